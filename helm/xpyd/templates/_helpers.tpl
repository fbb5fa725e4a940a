{{/* The release's name, with the chart's in it: xpyd for `helm install xpyd`. */}}
{{- define "xpyd.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "xpyd.operatorName" -}}
{{- include "xpyd.fullname" . }}-operator
{{- end -}}

{{/* Releases for some namespaces only may share a cluster, so theirs carries the namespace. */}}
{{- define "xpyd.clusterName" -}}
{{- include "xpyd.fullname" . -}}
{{- if .Values.watchNamespaces -}}-{{ .Release.Namespace }}{{- end -}}
{{- end -}}

{{- define "xpyd.serviceAccountName" -}}
{{- default (include "xpyd.operatorName" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "xpyd.uninstallName" -}}
{{- include "xpyd.fullname" . }}-uninstall
{{- end -}}

{{/* What selects the operator's pod: no hook's pod and no child of a fleet has these labels. */}}
{{- define "xpyd.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "xpyd.labels" -}}
{{ include "xpyd.componentLabels" (list . "operator") }}
{{- end -}}

{{/* Labels of what belongs to a part of the chart: (list $ "uninstall") */}}
{{- define "xpyd.componentLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* What cannot work is said before anything is installed. */}}
{{- define "xpyd.validate" -}}
{{- with .Values.images -}}
{{- if and (not .registry) (not .local) -}}
{{- fail "\n\nxpyd's images are not published anywhere yet. Either\n  build and push them:    make images push REGISTRY=registry.example.com/team\n  and install with:       --set images.registry=registry.example.com/team\nor load them on every node and install with --set images.local=true" -}}
{{- end -}}
{{- if and .registry .local -}}
{{- fail "\n\nimages.registry and images.local exclude each other: images come from a registry or lie on the nodes" -}}
{{- end -}}
{{- if and .local (eq $.Values.imagePullPolicy "Always") -}}
{{- fail "\n\nimagePullPolicy=Always would ask a registry for images that images.local says are on the nodes" -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.uninstall.deleteFleets) .Values.crds.install (not .Values.crds.keep) -}}
{{- fail "\n\nuninstall.deleteFleets=false needs crds.keep=true: without its CRD no fleet can stay" -}}
{{- end -}}
{{- if and .Release.IsUpgrade (not .Values.crds.install) -}}
{{- $crd := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "inferencefleets.xpyd.dev" -}}
{{- $notes := dict -}}
{{- with $crd -}}{{- $notes = default dict .metadata.annotations -}}{{- end -}}
{{- $owner := printf "%s/%s" (get $notes "meta.helm.sh/release-namespace") (get $notes "meta.helm.sh/release-name") -}}
{{- if and (eq $owner (printf "%s/%s" .Release.Namespace .Release.Name)) (ne (get $notes "helm.sh/resource-policy") "keep") -}}
{{- fail "\n\ncrds.install=false would delete this release's CRDs, and with them every fleet of the cluster: first helm upgrade with crds.keep=true, then with crds.install=false" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* image of "operator", "router" or "worker": include "xpyd.image" (list $ "worker") */}}
{{- define "xpyd.image" -}}
{{- $root := index . 0 -}}
{{- $images := $root.Values.images -}}
{{- $image := index $images (index . 1) -}}
{{- with $images.registry }}{{ . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest -}}@{{ $image.digest }}{{- else -}}:{{ default $root.Chart.AppVersion $image.tag }}{{- end -}}
{{- end -}}

{{- define "xpyd.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Pod security "restricted", for every pod of the chart. */}}
{{- define "xpyd.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "xpyd.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop:
    - ALL
{{- end -}}

{{- define "xpyd.scheduling" -}}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Annotations of an object that exists only while `helm uninstall` runs; the argument is its place. */}}
{{- define "xpyd.uninstallHook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* Annotations by which checkov knows what a pod does not pass, and why: (list map map) */}}
{{- define "xpyd.checkov" -}}
{{- $number := 0 -}}
{{- range . -}}
{{- range $check, $reason := . }}
{{- $number = add1 $number }}
checkov.io/skip{{ $number }}: {{ printf "%s=%s" $check $reason | quote }}
{{- end -}}
{{- end -}}
{{- end -}}
