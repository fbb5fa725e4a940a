{{/*
What the operator may do where it serves fleets. It creates by server-side apply, which needs
create and patch. It makes Secrets with KV keys, deletes those that a rotation replaced, and can
read none. The ConfigMaps say which keys count.
*/}}
{{- define "xpyd.operatorRules" -}}
- apiGroups: [xpyd.dev]
  resources: [inferencefleets]
  verbs: [get, list, watch, patch]
- apiGroups: [xpyd.dev]
  resources: [inferencefleetpools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [xpyd.dev]
  resources: [inferencefleets/status, inferencefleetpools/status]
  verbs: [patch]
# Owner references that block deletion need it where the API server enforces them.
- apiGroups: [xpyd.dev]
  resources: [inferencefleets/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies, ingresses]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
# Their readiness gate.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
# Whether the release that a fleet is marked with still runs.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get]
{{- end -}}

{{/* Which nodes are cordoned. Nodes are of no namespace, so a Role cannot give it. */}}
{{- define "xpyd.nodeRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list]
{{- end -}}

{{/* The Lease by which one pod of the release leads: in its own namespace alone. */}}
{{- define "xpyd.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, patch]
{{- end -}}

{{/*
The uninstall hook deletes fleets and sees whether what they owned is gone. Secrets it cannot see:
it tries to create one of that name, as a dry run.
*/}}
{{- define "xpyd.uninstallRules" -}}
- apiGroups: [xpyd.dev]
  resources: [inferencefleets]
  verbs: [list, delete]
- apiGroups: [xpyd.dev]
  resources: [inferencefleetpools]
  verbs: [list]
- apiGroups: [apps]
  resources: [deployments, controllerrevisions]
  verbs: [list]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [list]
- apiGroups: [""]
  resources: [pods, services, serviceaccounts, configmaps]
  verbs: [list]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies, ingresses]
  verbs: [list]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [list]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [list]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
{{- end -}}

{{/* Named namespaces, and CRDs that go with the release: those are every namespace's. */}}
{{- define "xpyd.uninstallAsksEverywhere" -}}
{{- if and .Values.watchNamespaces .Values.crds.install (not .Values.crds.keep) -}}yes{{- end -}}
{{- end -}}
