"""Least privilege: what the operator may do is what it does, and nothing with a star."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.chart.render import Helm, Obj, of_kind, one
from xpyd_operator.controller.decision.kinds import (
    EVENT,
    FLEET,
    LEASE,
    NODE,
    POD,
    POOL,
    SECRET,
    WATCHED,
)

Right = tuple[str, str, str]
"""group, resource, verb"""

ROLES = ("Role", "ClusterRole")
READ = {"get", "list", "watch"}
OWN = READ | {"create", "patch", "delete"}
NAMESPACED = {"watchNamespaces": ["serving", "lab"]}
OWN_LEASE = "xpyd-operator-lease"
HOOK_EVERYWHERE = "xpyd-xpyd-system-uninstall"
MODES: list[dict[str, Any]] = [{}, NAMESPACED]


def _rights(role: Obj) -> set[Right]:
    return {
        right
        for rule in role["rules"]
        for right in product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }


def _verbs(rights: set[Right], group: str, resource: str) -> set[str]:
    return {verb for g, r, verb in rights if (g, r) == (group, resource)}


@pytest.mark.parametrize("values", MODES)
def test_no_role_has_a_wildcard(helm: Helm, values: dict[str, Any]) -> None:
    roles = of_kind(helm.render(values), *ROLES)
    assert roles
    for role in roles:
        for rule in role["rules"]:
            assert set(rule) == {"apiGroups", "resources", "verbs"}
            assert not any("*" in text for key in rule for text in rule[key])


def test_the_operator_may_do_what_its_kinds_need_and_no_more(helm: Helm) -> None:
    rights = _rights(one(helm.render({"watchNamespaces": ["serving"]}), "Role", "xpyd-operator"))
    expected = {(kind.group, kind.plural): OWN for kind in WATCHED}
    expected[FLEET.group, FLEET.plural] = READ | {"patch"}
    expected[FLEET.group, f"{FLEET.plural}/status"] = {"patch"}
    expected[FLEET.group, f"{FLEET.plural}/finalizers"] = {"update"}
    expected[POOL.group, f"{POOL.plural}/status"] = {"patch"}
    expected[POD.group, POD.plural] = READ | {"patch"}
    expected[POD.group, f"{POD.plural}/status"] = {"patch"}
    expected[SECRET.group, SECRET.plural] = {"create", "delete"}
    expected[EVENT.group, EVENT.plural] = {"create"}
    expected[LEASE.group, LEASE.plural] = {"get"}
    given = {(group, resource): _verbs(rights, group, resource) for group, resource, _ in rights}
    assert given == expected


@pytest.mark.parametrize("values", MODES)
def test_the_operator_may_take_its_own_lease_and_only_see_others(
    helm: Helm, values: dict[str, Any]
) -> None:
    role = one(helm.render(values), "Role", OWN_LEASE)
    assert role["metadata"]["namespace"] == "xpyd-system"
    wanted = {(LEASE.group, LEASE.plural, verb) for verb in ("get", "create", "patch")}
    assert _rights(role) == wanted


@pytest.mark.parametrize("values", MODES)
def test_nobody_reads_a_secret(helm: Helm, values: dict[str, Any]) -> None:
    for role in of_kind(helm.render(values), *ROLES):
        assert _verbs(_rights(role), "", "secrets") <= {"create", "delete"}


def test_named_namespaces_leave_no_right_to_anything_elsewhere(helm: Helm) -> None:
    values = {**NAMESPACED, "rbac": {"userRoles": False}}
    objects = helm.render({**values, "crds": {"keep": True}})
    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")
    roles = [role["metadata"] for role in of_kind(objects, "Role", "RoleBinding")]
    places = [meta["namespace"] for meta in roles if meta["name"] != OWN_LEASE]
    assert set(places) == set(NAMESPACED["watchNamespaces"])
    # CRDs that go are everybody's: the hook sees, before, whether there are other fleets.
    hook = one(of_kind(helm.render(values), *ROLES[1:]), "ClusterRole", HOOK_EVERYWHERE)
    assert _rights(hook) == {(FLEET.group, FLEET.plural, "list")}


def test_nodes_may_be_listed_where_all_namespaces_are_served_and_it_is_wanted(helm: Helm) -> None:
    def given(values: dict[str, Any]) -> set[str]:
        roles = of_kind(helm.render(values), *ROLES)
        rights = {right for role in roles for right in _rights(role)}
        return _verbs(rights, NODE.group, NODE.plural)

    assert given({}) == {"list"}
    assert given({"operator": {"readNodes": False}}) == set()
    assert given(NAMESPACED) == set()


def test_cluster_wide_and_named_namespaces_give_the_same_rights_but_for_nodes(helm: Helm) -> None:
    wide = helm.render()
    names = {role["metadata"]["name"] for role in of_kind(wide, "Role", "RoleBinding")}
    assert names == {OWN_LEASE}
    everywhere = _rights(one(wide, "ClusterRole", "xpyd-operator"))
    named = [
        role
        for role in of_kind(helm.render(NAMESPACED), "Role")
        if role["metadata"]["name"] == "xpyd-operator"
    ]
    assert len(named) == 2
    nodes = {(NODE.group, NODE.plural, "list")}
    assert all(_rights(role) == everywhere - nodes for role in named)


@pytest.mark.parametrize("values", MODES)
def test_every_role_of_the_chart_is_bound_to_an_account_of_the_chart(
    helm: Helm, values: dict[str, Any]
) -> None:
    objects = helm.render({**values, "rbac": {"userRoles": False}})
    accounts = {a["metadata"]["name"] for a in of_kind(objects, "ServiceAccount")}
    roles = {_place(role) for role in of_kind(objects, *ROLES)}
    bound: set[tuple[str, str, str]] = set()
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        reference = binding["roleRef"]
        bound.add((reference["kind"], binding["metadata"].get("namespace", ""), reference["name"]))
        assert [s["namespace"] for s in binding["subjects"]] == ["xpyd-system"]
        assert {s["name"] for s in binding["subjects"]} <= accounts
    assert bound == roles


def _place(role: Obj) -> tuple[str, str, str]:
    meta = role["metadata"]
    return role["kind"], meta.get("namespace", ""), meta["name"]


def test_the_uninstall_hook_may_only_delete_fleets_and_see_what_they_own(helm: Helm) -> None:
    wanted = {(kind.group, kind.plural, "list") for kind in WATCHED}
    wanted |= {(FLEET.group, FLEET.plural, "delete"), (SECRET.group, SECRET.plural, "create")}
    assert _rights(one(helm.render(), "ClusterRole", "xpyd-uninstall")) == wanted
    named = of_kind(helm.render(NAMESPACED), "Role")
    hooks = [role for role in named if role["metadata"]["name"] == "xpyd-uninstall"]
    assert len(hooks) == 2
    assert all(_rights(role) == wanted for role in hooks)


def test_users_get_fleets_with_the_built_in_roles(helm: Helm) -> None:
    objects = helm.render()
    view = one(objects, "ClusterRole", "xpyd-fleets-view")
    edit = one(objects, "ClusterRole", "xpyd-fleets-edit")
    aggregated = "rbac.authorization.k8s.io/aggregate-to-{}".format
    assert view["metadata"]["labels"][aggregated("view")] == "true"
    assert aggregated("view") not in edit["metadata"]["labels"]
    for name in ("edit", "admin"):
        assert edit["metadata"]["labels"][aggregated(name)] == "true"
    assert {verb for _, _, verb in _rights(view)} == READ
    assert {"create", "delete"} <= _verbs(_rights(edit), FLEET.group, FLEET.plural)
    # The operator makes pools; users scale them.
    assert _verbs(_rights(edit), POOL.group, POOL.plural) == {"update", "patch"}
    assert _verbs(_rights(edit), POOL.group, f"{POOL.plural}/scale") == {"update", "patch"}
