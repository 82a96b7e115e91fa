{{/*
SPDX-FileCopyrightText: The GPUMonitor authors
SPDX-License-Identifier: Apache-2.0
*/}}

{{/* What the pods of both processes have in common. Each takes (dict "root" $ "component" "webhook" "values" .Values.webhook). */}}

{{- define "gpumonitor.podMetadata" -}}
annotations:
  # A changed setting restarts the pods: the file is read once, at start.
  checksum/settings: {{ include "gpumonitor.settings" .root | sha256sum }}
  kubectl.kubernetes.io/default-container: {{ .component }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
labels:
  {{- include "gpumonitor.labelsWith" (dict "root" .root "labels" .values.podLabels) | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "gpumonitor.podSettings" -}}
serviceAccountName: {{ include "gpumonitor.fullname" .root }}-{{ .component }}
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
volumes:
  - name: settings
    configMap:
      name: {{ include "gpumonitor.fullname" .root }}-settings
  - name: tmp
    emptyDir:
      sizeLimit: 16Mi
{{- end -}}

{{- define "gpumonitor.container" -}}
image: {{ include "gpumonitor.image" (dict "root" .root "image" .root.Values.image.operator) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command:
  - /opt/gpumonitor/bin/gpumon-{{ .component }}
  - --settings
  - /etc/gpumonitor/settings.json
env:
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: POD_NAMESPACE
    valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
  - name: POD_UID
    valueFrom: {fieldRef: {fieldPath: metadata.uid}}
  {{- with .values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
# /healthz says that the process lives, /readyz that it can serve.
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 2
resources:
  {{- toYaml .values.resources | nindent 2 }}
securityContext:
  {{- toYaml .root.Values.containerSecurityContext | nindent 2 }}
terminationMessagePolicy: FallbackToLogsOnError
volumeMounts:
  - {name: settings, mountPath: /etc/gpumonitor, readOnly: true}
  - {name: tmp, mountPath: /tmp}
{{- end -}}
