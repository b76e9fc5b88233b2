{{/* The template of a pod. A dict of root (the chart's context) and component: server, leader or follower. */}}
{{- define "jaxinfer.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $grouped := ne .component "server" -}}
{{- $doors := ne .component "follower" -}}
metadata:
  labels:
    {{- include "jaxinfer.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ ternary "server" "follower" $doors }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "jaxinfer.config" $root | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "jaxinfer.fullname" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "jaxinfer.grace" $root }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ int $values.runAsUser }}
    runAsGroup: {{ int $values.runAsUser }}
    fsGroup: {{ int $values.runAsUser }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  containers:
    - name: jaxinfer
      image: {{ include "jaxinfer.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args:
        - serve
        - --config
        - /etc/jaxinfer/server/production.yaml
        {{- if $grouped }}
        - --num-processes=$(LWS_GROUP_SIZE)
        - --process-id=$(LWS_WORKER_INDEX)
        - --coordinator-address=$({{ ternary "POD_IP" "LWS_LEADER_ADDRESS" $doors }}):{{ int $values.leaderWorkerSet.coordinatorPort }}
        {{- end }}
      {{- if or (eq .component "leader") $values.extraEnv }}
      env:
        {{- if eq .component "leader" }}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}} # there before the name is known
        {{- end }}
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      {{- if $doors }}
      {{- include "jaxinfer.doors" $root | nindent 6 }}
      {{- else }}
      lifecycle: # a group lives as long as its first process drains
        preStop: {sleep: {seconds: {{ include "jaxinfer.drain" $root }}}}
      {{- end }}
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        {{- include "jaxinfer.mounts" . | nindent 8 }}
  volumes:
    {{- include "jaxinfer.volumes" . | nindent 4 }}
  {{- if $doors }}
  topologySpreadConstraints:
    - topologyKey: {{ $values.topologySpread.key }}
      maxSkew: {{ int $values.topologySpread.maxSkew }}
      whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "jaxinfer.servers" $root | nindent 10 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- range $name := list "nodeSelector" "tolerations" "affinity" }}
  {{- with index $values $name }}
  {{ $name }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Ports and probes of a container that has doors. */}}
{{- define "jaxinfer.doors" -}}
{{- $probes := .Values.probes -}}
{{- $scheme := include "jaxinfer.scheme" . -}}
ports:
  {{- with include "jaxinfer.httpPort" . }}
  - {name: http, containerPort: {{ . }}}
  {{- end }}
  - {name: grpc, containerPort: {{ int .Values.config.grpc_port }}}
  - {name: metrics, containerPort: {{ int .Values.config.metrics_port }}}
  {{- if .Values.kvEvents.enabled }}
  - {name: kv-events, containerPort: {{ int .Values.kvEvents.port }}}
  - {name: kv-replay, containerPort: {{ int .Values.kvEvents.replayPort }}}
  {{- end }}
startupProbe: # of the doors' process, not of the model
  httpGet: {path: /health, port: metrics, scheme: {{ $scheme }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ divf $probes.startupSeconds 2 | ceil | int }}
readinessProbe:
  httpGet: {path: /ready, port: metrics, scheme: {{ $scheme }}}
  periodSeconds: {{ int $probes.readinessPeriod }}
  timeoutSeconds: 5
  failureThreshold: 1
livenessProbe:
  httpGet: {path: /health, port: metrics, scheme: {{ $scheme }}}
  periodSeconds: {{ int $probes.livenessPeriod }}
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{/* As jaxinfer.pod: of a dict. Who has no doors needs neither keys nor certificates. */}}
{{- define "jaxinfer.mounts" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
- {name: config, mountPath: /etc/jaxinfer/server, readOnly: true}
{{- if ne .component "follower" }}
{{- if include "jaxinfer.keysSecret" $root }}
- {name: keys, mountPath: /etc/jaxinfer/keys, readOnly: true}
{{- end }}
{{- if $values.tls.secret }}
- {name: tls, mountPath: /etc/jaxinfer/tls, readOnly: true}
{{- end }}
{{- end }}
{{- if ne .component "server" }}
- {name: group, mountPath: /etc/jaxinfer/group, readOnly: true}
{{- end }}
{{- if $values.models.claim }}
- {name: models, mountPath: {{ $values.models.path }}, readOnly: {{ $values.models.readOnly }}}
{{- end }}
- {name: programs, mountPath: /var/cache/jaxinfer}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/jaxinfer}
- {name: shared, mountPath: /dev/shm}
{{- end -}}

{{- define "jaxinfer.volumes" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
- name: config
  configMap: {name: {{ include "jaxinfer.fullname" $root }}}
{{- if ne .component "follower" }}
{{- with include "jaxinfer.keysSecret" $root }}
- name: keys
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with $values.tls.secret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- if ne .component "server" }}
- name: group
  secret: {secretName: {{ $values.leaderWorkerSet.groupKey.secret }}, defaultMode: 0440}
{{- end }}
{{- with $values.models.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: {{ $values.models.readOnly }}}
{{- end }}
- name: programs
  {{- if $values.programs.claim }}
  persistentVolumeClaim: {claimName: {{ $values.programs.claim }}}
  {{- else if $values.programs.hostPath }}
  hostPath: {path: {{ $values.programs.hostPath }}, type: Directory}
  {{- else }}
  emptyDir: {sizeLimit: {{ $values.programs.size }}}
  {{- end }}
- name: tmp
  emptyDir: {sizeLimit: {{ $values.temporary.tmp }}}
- name: home
  emptyDir: {sizeLimit: {{ $values.temporary.home }}}
- name: shared
  emptyDir: {medium: Memory, sizeLimit: {{ $values.temporary.shared }}}
{{- end -}}
