{{- define "keblet-observe.labels" -}}
app.kubernetes.io/name: keblet-observe
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: keblet-observe-{{ .Chart.Version }}
{{- end }}

{{- define "keblet-observe.selector" -}}
app.kubernetes.io/name: keblet-observe
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
