{{/* Names and labels, the settings of the server, and what values must not contradict. */}}

{{- define "jaxinfer.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for what the chart and LeaderWorkerSet put behind it. */}}
{{- define "jaxinfer.fullname" -}}
{{- $name := include "jaxinfer.name" . -}}
{{- $made := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $made .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* All pods of the chart. */}}
{{- define "jaxinfer.selector" -}}
app.kubernetes.io/name: {{ include "jaxinfer.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Those that have doors: a group's first. */}}
{{- define "jaxinfer.servers" -}}
{{ include "jaxinfer.selector" . }}
app.kubernetes.io/component: server
{{- end -}}

{{/* Envoy's pods, which are none of the chart's pods above. */}}
{{- define "jaxinfer.proxies" -}}
app.kubernetes.io/name: {{ include "jaxinfer.name" . }}-envoy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* What is no selector. */}}
{{- define "jaxinfer.about" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "jaxinfer.labels" -}}
{{ include "jaxinfer.selector" . }}
{{ include "jaxinfer.about" . }}
{{- end -}}

{{- define "jaxinfer.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}{{ else }}{{ $image.repository }}:{{ $image.tag }}{{ end -}}
{{- end -}}

{{- define "jaxinfer.keysSecret" -}}
{{- if .Values.apiKeys.entries }}{{ include "jaxinfer.fullname" . }}-keys{{ else }}{{ .Values.apiKeys.secret }}{{ end -}}
{{- end -}}

{{/* What is added to the settings: addresses, and the files that the pod mounts. */}}
{{- define "jaxinfer.paths" -}}
host: {{ .Values.listen | quote }}
metrics_host: {{ .Values.listen | quote }}
compilation_cache_dir: /var/cache/jaxinfer
{{- if include "jaxinfer.keysSecret" . }}
api_keys: /etc/jaxinfer/keys/{{ .Values.apiKeys.key }}
{{- end }}
{{- if .Values.tls.secret }}
tls_cert: /etc/jaxinfer/tls/{{ .Values.tls.cert }}
tls_key: /etc/jaxinfer/tls/{{ .Values.tls.key }}
{{- end }}
{{- if .Values.kvEvents.enabled }}
{{- $host := ternary "[::]" .Values.listen (eq .Values.listen "::") }}
kv_events: true
kv_events_endpoint: tcp://{{ $host }}:{{ int .Values.kvEvents.port }}
kv_events_replay_endpoint: tcp://{{ $host }}:{{ int .Values.kvEvents.replayPort }}
kv_events_insecure: true
{{- end }}
{{- if eq .Values.mode "LeaderWorkerSet" }}
group_key_file: /etc/jaxinfer/group/{{ .Values.leaderWorkerSet.groupKey.key }}
{{- end }}
{{- end -}}

{{- define "jaxinfer.config" -}}
{{ mergeOverwrite (deepCopy .Values.config) (include "jaxinfer.paths" . | fromYaml) | toYaml }}
{{- end -}}

{{/* Seconds in which a server may drain: what a group's other pods wait before they end. */}}
{{- define "jaxinfer.drain" -}}
{{ addf .Values.config.drain_delay .Values.config.drain_seconds | ceil | int }}
{{- end -}}

{{- define "jaxinfer.grace" -}}
{{ addf .Values.config.drain_delay .Values.config.drain_seconds .Values.drainMargin | ceil | int }}
{{- end -}}

{{/* Empty where config.http_port is off. */}}
{{- define "jaxinfer.httpPort" -}}
{{- if kindIs "float64" .Values.config.http_port }}{{ int .Values.config.http_port }}{{ end -}}
{{- end -}}

{{- define "jaxinfer.scheme" -}}
{{- ternary "HTTPS" "HTTP" (ne .Values.tls.secret "") -}}
{{- end -}}

{{/* Fails where values contradict one another; what one value alone can tell is in values.schema.json. */}}
{{- define "jaxinfer.check" -}}
{{- $keys := include "jaxinfer.keysSecret" . -}}
{{- if and .Values.apiKeys.secret .Values.apiKeys.entries }}
{{- fail "apiKeys.secret and apiKeys.entries exclude each other: set apiKeys.secret to \"\"" }}
{{- end }}
{{- if and (not $keys) (not .Values.config.insecure) }}
{{- fail "apiKeys.secret is not set: name a Secret, or set config.insecure where everybody in the network may do everything" }}
{{- end }}
{{- if and (eq .Values.mode "LeaderWorkerSet") (not .Values.leaderWorkerSet.groupKey.secret) }}
{{- fail "leaderWorkerSet.groupKey.secret is not set: name a Secret that all pods of a group have" }}
{{- end }}
{{- if and .Values.programs.claim .Values.programs.hostPath }}
{{- fail "programs.claim and programs.hostPath exclude each other" }}
{{- end }}
{{- if and .Values.podMonitor.enabled $keys (not .Values.podMonitor.keySecret) }}
{{- fail "podMonitor.keySecret is not set: with apiKeys Prometheus needs a key of scope observe" }}
{{- end }}
{{- if and .Values.podMonitor.enabled .Values.tls.secret (not (and .Values.podMonitor.ca .Values.podMonitor.serverName)) }}
{{- fail "podMonitor.ca or podMonitor.serverName is not set: with tls.secret Prometheus checks the certificate" }}
{{- end }}
{{- if and .Values.gateway.enabled (not .Values.gateway.parents) }}
{{- fail "gateway.parents is empty: name the Gateway" }}
{{- end }}
{{- if and .Values.gateway.enabled .Values.tls.secret }}
{{- fail "gateway.enabled and tls.secret exclude each other: the gateway ends TLS, and speaks to the pods without it" }}
{{- end }}
{{- if and .Values.gateway.enabled (not (include "jaxinfer.httpPort" .)) }}
{{- fail "gateway.enabled needs config.http_port" }}
{{- end }}
{{- if and .Values.gateway.endpointPicker.name (not .Values.gateway.enabled) }}
{{- fail "gateway.endpointPicker.name needs gateway.enabled" }}
{{- end }}
{{- if and .Values.envoy.enabled .Values.gateway.enabled }}
{{- fail "envoy.enabled and gateway.enabled exclude each other" }}
{{- end }}
{{- if and .Values.envoy.enabled .Values.tls.secret }}
{{- fail "envoy.enabled and tls.secret exclude each other: Envoy speaks to the pods without TLS" }}
{{- end }}
{{- if and .Values.envoy.enabled (not (include "jaxinfer.httpPort" .)) }}
{{- fail "envoy.enabled needs config.http_port" }}
{{- end }}
{{- if and .Values.kvEvents.enabled (not (and .Values.networkPolicy.enabled .Values.networkPolicy.routers)) }}
{{- fail "kvEvents.enabled needs networkPolicy.enabled and networkPolicy.routers: ZMQ asks nobody for a key" }}
{{- end }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}
{{- fail "autoscaling.minReplicas is more than autoscaling.maxReplicas" }}
{{- end }}
{{- if and (eq (int .Values.maxUnavailable) 0) (eq (int .Values.maxSurge) 0) }}
{{- fail "maxUnavailable and maxSurge are both 0: a rollout could not begin" }}
{{- end }}
{{- end -}}
