#!/usr/bin/env bash
# Shows one run in Grafana, in the foreground, on 127.0.0.1: this project's dashboard, and those that the Metrics tab of Ray's
# dashboard embeds. Prometheus must run already (launch/prometheus.sh).
#
#   bash launch/grafana.sh runs/my-run
#
#   GRAFANA            the program, grafana-server or grafana         (the one of them that is installed)
#   GRAFANA_HOME       its files                                      (/usr/share/grafana)
#   GRAFANA_PORT       port on 127.0.0.1                              (3000)
#   RAY_PROMETHEUS_HOST  the Prometheus that it asks                  (http://127.0.0.1:9090)
#   VENV               environment with this package and Ray's dashboard  (.venv of the repository)
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
fail() {
    echo "grafana: error: $*" >&2
    exit 2
}
[[ $# -eq 1 && -d $1 ]] || fail "give the directory of a run; got ${*:-nothing}"
program="${GRAFANA:-$(command -v grafana-server grafana | head -n 1 || true)}"
command -v "${program:-grafana-server}" >/dev/null || fail "${program:-grafana-server} is not installed; install Grafana, or set GRAFANA"
python="${VENV:-$here/../.venv}/bin/python"
folder="$(cd -- "$1" && pwd)/logs/grafana"
mkdir -p -- "$folder/dashboards" "$folder/provisioning/dashboards" "$folder/provisioning/datasources"

cp -- "$here/monitoring/grafana-dashboard.json" "$folder/dashboards/distill_rl.json"
"$python" - "$folder/dashboards" <<'PYTHON' || fail "$python must have Ray with the extra dashboard; set VENV"
import pathlib, sys
from ray.dashboard.modules.metrics.grafana_dashboard_factory import generate_default_grafana_dashboard
pathlib.Path(sys.argv[1], "ray.json").write_text(generate_default_grafana_dashboard()[0])
PYTHON
cat >"$folder/provisioning/dashboards/default.yml" <<YAML
apiVersion: 1
providers:
  - {name: distill_rl, type: file, options: {path: "$folder/dashboards"}}
YAML
cat >"$folder/provisioning/datasources/default.yml" <<YAML
apiVersion: 1
datasources:
  - {name: ${RAY_PROMETHEUS_NAME:-Prometheus}, type: prometheus, access: proxy, isDefault: true, url: "${RAY_PROMETHEUS_HOST:-http://127.0.0.1:9090}"}
YAML
# Who reaches the port may look without a password, as in Ray's own configuration: the Metrics tab embeds the panels.
cat >"$folder/grafana.ini" <<INI
[server]
http_addr = 127.0.0.1
http_port = ${GRAFANA_PORT:-3000}
[security]
allow_embedding = true
[auth.anonymous]
enabled = true
org_role = Viewer
[analytics]
reporting_enabled = false
check_for_updates = false
[paths]
data = $folder/data
logs = $folder
plugins = $folder/plugins
provisioning = $folder/provisioning
INI
command=("$program")
[[ ${program##*/} == grafana ]] && command+=(server)
exec "${command[@]}" --homepath "${GRAFANA_HOME:-/usr/share/grafana}" --config "$folder/grafana.ini"
