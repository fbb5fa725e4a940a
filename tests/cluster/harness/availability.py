"""Whether this machine can have a cluster: installs and builds what is missing, or says what is.

The answers are texts, as pytest's skip wants them: None is yes.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess

from tests.cluster.harness import build, packages, tools


@functools.cache
def why_no_control_plane() -> str | None:
    """Why there can be no control plane, or None, and then all it needs is there."""
    if platform.system() != "Linux":
        return "a Linux kernel is needed"
    return packages.install(packages.NAMESPACES) or _no_namespaces() or _no_programs(build.KUBE)


@functools.cache
def why_no_node() -> str | None:
    """Why there can be no real node, or None, and then all it needs is there."""
    return (
        why_no_control_plane()
        or packages.install(packages.NODE)
        or _no_programs(build.TESTPOD, build.COREDNS)
    )


def _no_namespaces() -> str | None:
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
        timeout=20,
        env={**os.environ, "LC_ALL": "C"},
    )
    if done.returncode == 0:
        return None
    return f"namespaces cannot be made here: {done.stderr.strip()}"


def _no_programs(*programs: build.Program) -> str | None:
    """A machine without Go, network or PyPI cannot; a build that fails with them is an error."""
    try:
        tools.kubectl_binary()
        tools.helm_binary()
    except tools.ToolMissing as error:
        return str(error)
    if not all(build.is_built(program) for program in programs):
        problem = build.missing_for_build()
        if problem is not None:
            return problem
    for program in programs:
        build.binary(program)
    return None
