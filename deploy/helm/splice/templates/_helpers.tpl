{{- define "splice.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that select pods: they may never change. Argument: dict root, component. */}}
{{- define "splice.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "splice.labels" -}}
{{ include "splice.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "splice.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{/* HOST:PORT of every replica of a pool, in order, separated by commas: what --prefill, --decode and --store take. The names
     are the StatefulSet's, so they are known before any pod is; of a pool that is scaled, all that there may be. */}}
{{- define "splice.members" -}}
{{- $pool := index .root.Values .component -}}
{{- $service := printf "%s-%s" (include "splice.fullname" .root) .component -}}
{{- $members := list -}}
{{- $count := int $pool.replicas -}}
{{- if and .root.Values.autoscaling.enabled (hasKey .root.Values.autoscaling .component) -}}
{{- $count = int (index .root.Values.autoscaling .component).maxReplicas -}}
{{- end -}}
{{- range $i := until $count -}}
{{- $members = append $members (printf "%s-%d.%s.%s.svc.%s:%d" $service $i $service $.root.Release.Namespace $.root.Values.cluster.domain (int $pool.port)) -}}
{{- end -}}
{{- join "," $members -}}
{{- end -}}

{{/* The value of --discovery; empty: the lists. */}}
{{- define "splice.discovery" -}}
{{- if eq .Values.discovery.mode "kubernetes" -}}
kubernetes://{{ .Release.Namespace }}/{{ include "splice.fullname" . }}
{{- else if eq .Values.discovery.mode "etcd" -}}
etcd://{{ join "," .Values.discovery.etcd.endpoints }}{{ .Values.discovery.etcd.prefix }}
{{- end -}}
{{- end -}}

{{/* Flags, mount and volume of what etcd is told; nothing where etcd lets everybody in. */}}
{{- define "splice.etcdArgs" -}}
{{- $etcd := .Values.discovery.etcd -}}
{{- if and (eq .Values.discovery.mode "etcd") $etcd.existingSecret -}}
- --etcd-ca=/etc/splice/etcd/ca.crt
{{- if $etcd.clientCertificate }}
- --etcd-cert=/etc/splice/etcd/tls.crt
- --etcd-key=/etc/splice/etcd/tls.key
{{- end }}
{{- if $etcd.user }}
- --etcd-user={{ $etcd.user }}
- --etcd-password-file=/etc/splice/etcd/password
{{- end }}
{{- end -}}
{{- end -}}

{{- define "splice.etcdMount" -}}
{{- if include "splice.etcdArgs" . -}}
- {name: etcd, mountPath: /etc/splice/etcd, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "splice.etcdVolume" -}}
{{- if include "splice.etcdArgs" . -}}
- name: etcd
  secret:
    secretName: {{ .Values.discovery.etcd.existingSecret }}
    defaultMode: 0440
{{- end -}}
{{- end -}}

{{/* The pod's own address as peers write it; IPv6 needs brackets in front of a port. */}}
{{- define "splice.podAddress" -}}
{{ ternary "[$(POD_IP)]" "$(POD_IP)" .Values.cluster.ipv6 }}
{{- end -}}

{{- define "splice.anyAddress" -}}
{{ ternary "[::]" "0.0.0.0" .Values.cluster.ipv6 }}
{{- end -}}

{{- define "splice.authSecret" -}}
{{ default (printf "%s-auth" (include "splice.fullname" .)) .Values.auth.existingSecret }}
{{- end -}}

{{/* Flags, mount and volume of the certificates; nothing without TLS. */}}
{{- define "splice.tlsArgs" -}}
{{- if .Values.tls.enabled -}}
- --tls-cert=/etc/splice/tls/tls.crt
- --tls-key=/etc/splice/tls/tls.key
- --tls-ca=/etc/splice/tls/ca.crt
- --tls-server-name={{ .Values.tls.serverName }}
{{- end -}}
{{- end -}}

{{/* Where spans go; nothing without a collector. */}}
{{- define "splice.traceArgs" -}}
{{- with .Values.tracing.endpoint -}}
- --otlp-endpoint={{ . }}
{{- end -}}
{{- end -}}

{{- define "splice.tlsMount" -}}
{{- if .Values.tls.enabled -}}
- {name: tls, mountPath: /etc/splice/tls, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "splice.tlsVolume" -}}
{{- if .Values.tls.enabled -}}
- name: tls
  secret:
    secretName: {{ .Values.tls.existingSecret }}
    defaultMode: 0440
{{- end -}}
{{- end -}}

{{/* What all pods share, above their containers. Argument: dict root, component, pool. */}}
{{- define "splice.podSpec" -}}
serviceAccountName: {{ include "splice.fullname" .root }}-{{ .component }}
automountServiceAccountToken: {{ and (eq .component "router") (eq .root.Values.discovery.mode "kubernetes") }}
enableServiceLinks: false
{{- with .pool.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  - maxSkew: {{ .pool.topologySpread.maxSkew }}
    topologyKey: {{ .pool.topologySpread.topologyKey }}
    whenUnsatisfiable: {{ .pool.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "splice.selector" . | nindent 8 }}
{{- with .pool.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "splice.podMetadata" -}}
labels:
  {{- include "splice.labels" (dict "root" .root "component" .component) | nindent 2 }}
  {{- with .pool.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $scrape := and .root.Values.scrapeAnnotations (not .root.Values.monitoring.podMonitor.enabled) }}
{{- if or $scrape .pool.podAnnotations }}
annotations:
  {{- if $scrape }}
  prometheus.io/scrape: "true"
  prometheus.io/port: {{ .pool.metricsPort | quote }}
  prometheus.io/path: /metrics
  {{- end }}
  {{- with .pool.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "splice.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if .rdma }}
    add: [IPC_LOCK]
    {{- end }}
{{- end -}}

{{- define "splice.podEnv" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end -}}

{{/* Argument: dict startupSeconds. A program opens its metrics port when it serves, so the start-up probe waits for the model. */}}
{{- define "splice.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (int .startupSeconds) 5 }}
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "splice.modelVolume" -}}
- name: model
  {{- toYaml .Values.model.volume | nindent 2 }}
{{- end -}}

{{- define "splice.modelMount" -}}
- name: model
  mountPath: {{ .Values.model.mountPath }}
  readOnly: true
  {{- with .Values.model.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end -}}

{{/* Fetches the model before the program starts; nothing if the folder has it. */}}
{{- define "splice.modelInit" -}}
{{- if .Values.model.pull -}}
initContainers:
  - name: model
    image: {{ include "splice.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [splice, pull]
    args:
      - {{ .Values.model.pull }}
      - --to={{ .Values.model.mountPath }}
      - --hub={{ .Values.model.hub }}
      - --if-missing
    {{- with .Values.model.tokenSecret }}
    env:
      - name: HF_TOKEN
        valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
    {{- end }}
    {{- include "splice.containerSecurity" dict | nindent 4 }}
    resources:
      requests: {cpu: 500m, memory: 256Mi}
      limits: {memory: 512Mi}
    volumeMounts:
      - name: model
        mountPath: {{ .Values.model.mountPath }}
        {{- with .Values.model.subPath }}
        subPath: {{ . }}
        {{- end }}
{{- end -}}
{{- end -}}

{{/* Requests and limits, and the devices of a worker. Argument: dict root, pool, gpus. */}}
{{- define "splice.resources" -}}
{{- $devices := dict -}}
{{- if and .root.Values.gpu.enabled (gt (int .gpus) 0) (not (hasPrefix "cpu" (default "" .pool.backend))) -}}
{{- $_ := set $devices .root.Values.gpu.resourceName (int .gpus) -}}
{{- end -}}
{{- if .root.Values.rdma.enabled -}}
{{- $_ := set $devices .root.Values.rdma.resourceName (int .root.Values.rdma.count) -}}
{{- end -}}
{{- $requests := merge (dict) (default (dict) .pool.resources.requests) $devices -}}
{{- $limits := merge (dict) (default (dict) .pool.resources.limits) $devices -}}
resources:
  requests:
    {{- toYaml $requests | nindent 4 }}
  limits:
    {{- toYaml $limits | nindent 4 }}
{{- end -}}

{{/* How many workers there are, in words. Argument: list root, component. */}}
{{- define "splice.poolSize" -}}
{{- $root := first . -}}
{{- $limits := index $root.Values.autoscaling (last .) -}}
{{- if $root.Values.autoscaling.enabled -}}
{{ int $limits.minReplicas }} to {{ int $limits.maxReplicas }}
{{- else -}}
{{ (index $root.Values (last .)).replicas }}
{{- end -}}
{{- end -}}
