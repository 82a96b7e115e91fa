{{/*
SPDX-FileCopyrightText: The GPUMonitor authors
SPDX-License-Identifier: Apache-2.0
*/}}

{{- define "gpumonitor.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The name from which all others derive. 40 characters leave room for the longest suffix in a Service's name. */}}
{{- define "gpumonitor.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "gpumonitor.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "gpumonitor.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Refuse a name that no Service can have, before half of the release is installed. */}}
{{- define "gpumonitor.refuseName" -}}
{{- $name := include "gpumonitor.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the objects of this release would be named %s, and a Service's name begins with a letter and has no dot: take another name for the release, or set fullnameOverride." $name) -}}
{{- end -}}
{{- end -}}

{{/* Refuse a second release: both would write the same GPUMonitors. Only where Helm talks to a cluster is one seen. */}}
{{- define "gpumonitor.refuseSecond" -}}
{{- $root := . -}}
{{- range (lookup "admissionregistration.k8s.io/v1" "MutatingWebhookConfiguration" "" "").items -}}
{{- $annotations := default dict .metadata.annotations -}}
{{- $name := default "" (get $annotations "meta.helm.sh/release-name") -}}
{{- $namespace := default "" (get $annotations "meta.helm.sh/release-namespace") -}}
{{- $ours := eq "gpumonitor" (default "" (get (default dict .metadata.labels) "app.kubernetes.io/part-of")) -}}
{{- if and $ours $name (not (and (eq $name $root.Release.Name) (eq $namespace $root.Release.Namespace))) -}}
{{- fail (printf "release %s in namespace %s is GPUMonitor, too, and works in all namespaces of the cluster: two would write the same GPUMonitors, each what the other does not see. Upgrade that one, or uninstall it first." $name $namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What never changes over the life of a release, and so may select. */}}
{{- define "gpumonitor.selectorLabels" -}}
app.kubernetes.io/name: {{ include "gpumonitor.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "gpumonitor.ownLabels" -}}
{{ include "gpumonitor.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: gpumonitor
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "gpumonitor.labels" -}}
{{ include "gpumonitor.ownLabels" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of one object, where commonLabels may be overridden: (dict "root" $ "labels" .Values.podMonitor.labels) */}}
{{- define "gpumonitor.labelsWith" -}}
{{ include "gpumonitor.ownLabels" .root }}
{{- with mergeOverwrite (deepCopy (default dict .root.Values.commonLabels)) (default dict .labels) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Refuse labels, annotations and variables that the chart sets itself: two of one name, or a selector that fits no more. */}}
{{- define "gpumonitor.refuseOwnKeys" -}}
{{- $labels := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/version" "app.kubernetes.io/part-of"
      "app.kubernetes.io/managed-by" "app.kubernetes.io/component" "helm.sh/chart" -}}
{{- $annotations := list "checksum/settings" "kubectl.kubernetes.io/default-container" -}}
{{- $given := dict "commonLabels" .Values.commonLabels "podMonitor.labels" .Values.podMonitor.labels
      "prometheusRule.labels" .Values.prometheusRule.labels "dashboards.labels" .Values.dashboards.labels
      "controller.podLabels" .Values.controller.podLabels "webhook.podLabels" .Values.webhook.podLabels -}}
{{- range $path, $values := $given -}}
{{- include "gpumonitor.refuseKeys" (dict "path" $path "keys" (keys (default dict $values)) "own" $labels) -}}
{{- end -}}
{{- range $component, $values := dict "controller" .Values.controller "webhook" .Values.webhook -}}
{{- range $name := list "podAnnotations" "serviceAccountAnnotations" -}}
{{- $path := printf "%s.%s" $component $name -}}
{{- include "gpumonitor.refuseKeys" (dict "path" $path "keys" (keys (default dict (get $values $name))) "own" $annotations) -}}
{{- end -}}
{{- $variables := list -}}
{{- range (default list $values.extraEnv) -}}{{- $variables = append $variables .name -}}{{- end -}}
{{- $path := printf "%s.extraEnv" $component -}}
{{- include "gpumonitor.refuseKeys" (dict "path" $path "keys" $variables "own" (list "POD_NAME" "POD_NAMESPACE" "POD_UID")) -}}
{{- end -}}
{{- end -}}

{{- define "gpumonitor.refuseKeys" -}}
{{- $path := .path -}}
{{- $own := .own -}}
{{- range .keys -}}
{{- if has . $own -}}
{{- fail (printf "%s may not contain %s: the chart sets it itself. Take another name." $path .) -}}
{{- else if regexMatch "^(gpumonitor\\.dev|ray\\.io|training\\.kubeflow\\.org)/" . -}}
{{- fail (printf "%s may not contain %s: names of that prefix tell GPUMonitor which pods are jobs and what to do with them. Take another name." $path .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Reference of one of our images: (dict "root" $ "image" .Values.image.sidecar) */}}
{{- define "gpumonitor.image" -}}
{{- $registry := required "image.registry is not set. There is no public registry of GPUMonitor's images: build both targets of the Dockerfile, push them, and set image.registry to where they are (docs/install.md)." .root.Values.image.registry -}}
{{- $name := printf "%s/%s" (trimSuffix "/" $registry) .image.repository -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (coalesce .image.tag .root.Values.image.tag .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/*
"true" where the controller may patch pods, which is only where a policy can narrow that right. Without a cluster
(`helm template`) kinds are not known, which shows in the lack of Pod; then the version that was asked for decides.
*/}}
{{- define "gpumonitor.rescue" -}}
{{- $served := .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy" -}}
{{- if not (.Capabilities.APIVersions.Has "v1/Pod") -}}
{{- $served = or $served (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and (eq .Values.rescue.mode "auto") $served -}}
true
{{- end -}}
{{- end -}}

{{/* "true" where PodMonitors are wanted. */}}
{{- define "gpumonitor.podMonitors" -}}
{{- if or (eq .Values.podMonitor.mode "enabled") (and (eq .Values.podMonitor.mode "auto") (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1/PodMonitor")) -}}
true
{{- end -}}
{{- end -}}

{{/* What both processes read; the names are those of operator/verl_gpumonitor_operator/settings.py. */}}
{{- define "gpumonitor.settings" -}}
{{- $images := dict
      "sidecar" (include "gpumonitor.image" (dict "root" . "image" .Values.image.sidecar))
      "operator" (include "gpumonitor.image" (dict "root" . "image" .Values.image.operator))
      "pullPolicy" .Values.image.pullPolicy -}}
{{- $controller := pick .Values.controller "leaseSeconds" "retentionSeconds" "notReportingSeconds"
      "statusMinIntervalSeconds" "statusWritesPerSecond" "eventsPerSecond" "eventsBurst" -}}
{{- toPrettyJson (dict
      "release" (include "gpumonitor.fullname" .)
      "namespace" .Release.Namespace
      "images" $images
      "injection" .Values.injection
      "report" .Values.report
      "controller" $controller
      "diagnosis" .Values.diagnosis
      "breaker" .Values.breaker) -}}
{{- end -}}
