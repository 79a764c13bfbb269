{{/* Refusals of combinations that cannot work and that the schema cannot see. Each message says what to set instead. */}}
{{- define "splice.check" -}}
{{- include "splice.checkAuth" . -}}
{{- include "splice.checkDiscovery" . -}}
{{- include "splice.checkPools" . -}}
{{- include "splice.checkAccess" . -}}
{{- end -}}

{{- define "splice.checkAuth" -}}
{{- with .Values.auth -}}
{{- range .apiKeys -}}
{{- if not (kindIs "map" .) -}}
{{- fail "auth.apiKeys: every entry is a map like {key: SECRET, name: NAME, role: operator}, not a line of text; values.yaml has examples" -}}
{{- end -}}
{{- end -}}
{{- if and (not .enabled) (or .apiKeys .namespaceSecret) -}}
{{- fail "auth.apiKeys and auth.namespaceSecret are not used with auth.enabled: false; leave them out, or set auth.enabled: true" -}}
{{- end -}}
{{- if and .enabled .existingSecret (or .apiKeys .namespaceSecret) -}}
{{- fail (printf "auth.apiKeys and auth.namespaceSecret are not used while auth.existingSecret is %q; set auth.existingSecret: \"\", or put them into that Secret" .existingSecret) -}}
{{- end -}}
{{- if and .enabled (not .existingSecret) -}}
{{- if not .apiKeys -}}
{{- fail "auth.enabled needs auth.existingSecret or auth.apiKeys; set auth.enabled: false for an open cluster" -}}
{{- end -}}
{{- if lt (len .namespaceSecret) 16 -}}
{{- fail "auth.namespaceSecret needs 16 characters or more; without it a restart of the router would lose every tenant's cached KV" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "splice.checkDiscovery" -}}
{{- if and (eq .Values.discovery.mode "etcd") (not .Values.discovery.etcd.endpoints) -}}
{{- fail "discovery.mode etcd needs discovery.etcd.endpoints" -}}
{{- end -}}
{{- if and (or .Values.discovery.etcd.clientCertificate .Values.discovery.etcd.user) (not .Values.discovery.etcd.existingSecret) -}}
{{- fail "discovery.etcd.clientCertificate and .user need discovery.etcd.existingSecret, which holds certificate and password" -}}
{{- end -}}
{{- end -}}

{{/* Who reaches the routers. A client with a podSelector alone is one of the release's own namespace. */}}
{{- define "splice.checkAccess" -}}
{{- $outside := not .Values.networkPolicy.enabled -}}
{{- range .Values.networkPolicy.clients -}}
{{- if or (hasKey . "namespaceSelector") (hasKey . "ipBlock") -}}
{{- $outside = true -}}
{{- end -}}
{{- end -}}
{{- $callers := dict "ingress.enabled" (list .Values.ingress.enabled "the ingress controller's") -}}
{{- $_ := set $callers "httpRoute.enabled" (list .Values.httpRoute.enabled "the gateway's") -}}
{{- $_ := set $callers "autoscaling.kind: keda" (list (and .Values.autoscaling.enabled (eq .Values.autoscaling.kind "keda")) "KEDA's") -}}
{{- range $value, $caller := $callers -}}
{{- if and (first $caller) (not $outside) -}}
{{- fail (printf "%s: networkPolicy.clients lets in pods of this namespace alone; add %s: - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NAMESPACE}}" $value (last $caller)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs, the gateway that it belongs to: [{name: GATEWAY, namespace: NAMESPACE}]" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled .Values.publicTls.enabled -}}
{{- fail "httpRoute.enabled with publicTls.enabled: a gateway speaks plain text to what is behind it; set publicTls.enabled: false and end TLS at the gateway's listener" -}}
{{- end -}}
{{- end -}}

{{- define "splice.checkPools" -}}
{{- $claim := .Values.model.volume.persistentVolumeClaim | default dict -}}
{{- if and .Values.model.pull $claim.readOnly -}}
{{- fail "model.pull needs a volume that it may write: set model.volume.persistentVolumeClaim.readOnly: false" -}}
{{- end -}}
{{- if and .Values.rdma.enabled (eq .Values.kvTransport "tcp") -}}
{{- fail "rdma.enabled needs kvTransport: auto; tcp never uses RDMA" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.router.replicas) 1) -}}
{{- fail "autoscaling.enabled needs router.replicas: 1; each of several routers plans by its own share of the load, and asks for too few workers" -}}
{{- end -}}
{{- range $name := list "prefill" "decode" -}}
{{- $pool := index $.Values $name -}}
{{- $limits := index $.Values.autoscaling $name -}}
{{- if and $.Values.autoscaling.enabled (gt (int $limits.minReplicas) (int $limits.maxReplicas)) -}}
{{- fail (printf "autoscaling.%s.minReplicas is above maxReplicas" $name) -}}
{{- end -}}
{{- if and (hasPrefix "cuda" $pool.backend) (not $.Values.gpu.enabled) -}}
{{- fail (printf "%s.backend %s needs gpu.enabled: true; without it the pods are given no GPU and end at start" $name $pool.backend) -}}
{{- end -}}
{{- if not $.Values.gpu.enabled -}}
{{- include "splice.checkBelow" (list (printf "%s.kvBytes" $name) $pool.kvBytes (printf "%s.resources.limits.memory" $name) ($pool.resources.limits).memory) -}}
{{- end -}}
{{- end -}}
{{- with .Values.store -}}
{{- if .replicas -}}
{{- include "splice.checkBelow" (list "store.memoryBytes" .memoryBytes "store.resources.limits.memory" (.resources.limits).memory) -}}
{{- include "splice.checkBelow" (list "store.diskBytes" .diskBytes "store.volume.size" .volume.size) -}}
{{- end -}}
{{- end -}}
{{- $ports := list .Values.router.httpPort .Values.router.grpcPort .Values.router.metricsPort -}}
{{- if lt (len (uniq $ports)) 3 -}}
{{- fail "router.httpPort, router.grpcPort and router.metricsPort must differ" -}}
{{- end -}}
{{- range $name := list "prefill" "decode" "store" -}}
{{- $pool := index $.Values $name -}}
{{- if eq (int $pool.port) (int $pool.metricsPort) -}}
{{- fail (printf "%s.port and %s.metricsPort must differ" $name $name) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "router" "prefill" "decode" "store" -}}
{{- range (index $.Values $name).extraArgs -}}
{{- $flag := . | splitList "=" | first -}}
{{- if and (eq $flag "--otlp-endpoint") $.Values.networkPolicy.enabled -}}
{{- fail (printf "%s.extraArgs: the network policy keeps spans in; set tracing.endpoint and networkPolicy.tracing instead of --otlp-endpoint" $name) -}}
{{- end -}}
{{- if has $flag (include "splice.ownFlags" $name | splitList " ") -}}
{{- fail (printf "%s.extraArgs: the chart sets %s by itself, and a program takes a flag once; values.yaml has the value for it" $name $flag) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Argument: list of a value's name, the value, the name of what it must stay below, and that; either may be auto or missing. */}}
{{- define "splice.checkBelow" -}}
{{- $value := include "splice.bytes" (index . 1) -}}
{{- $bound := include "splice.bytes" (index . 3) -}}
{{- if and $value $bound (ge (float64 $value) (float64 $bound)) -}}
{{- fail (printf "%s (%v) must be below %s (%v), with room for what the program needs beside it" (index . 0) (index . 1) (index . 2) (index . 3)) -}}
{{- end -}}
{{- end -}}

{{/* Bytes of 8GiB, 8Gi, 8G or 8; empty for anything else. */}}
{{- define "splice.bytes" -}}
{{- $text := toString . -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- if regexMatch "^[0-9.]+([kMGT]|[KMGT]iB?)?$" $text -}}
{{- $unit := regexFind "[A-Za-z]+$" $text | trimSuffix "B" -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (index $units $unit | float64) | printf "%f" -}}
{{- end -}}
{{- end -}}

{{/* Flags that every pod of a pool gets, whatever the values are. Argument: the pool's name. */}}
{{- define "splice.ownFlags" -}}
{{- $worker := "--model --listen --kv-listen-host --metrics-listen --worker-id --backend --tp --kv-bytes --kv-transport --host-kv-bytes --log-level" -}}
{{- if eq . "router" -}}
--model --http --grpc --metrics-listen --max-queue --max-running --request-timeout-ms --drain-timeout-ms --log-level
{{- else if eq . "prefill" -}}
{{ $worker }}
{{- else if eq . "decode" -}}
{{ $worker }} --max-sequences
{{- else -}}
--listen --kv-listen-host --metrics-listen --data-dir --memory-bytes --disk-bytes --kv-transport --log-level
{{- end -}}
{{- end -}}
