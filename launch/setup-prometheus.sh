#!/usr/bin/env bash
# Finds Prometheus, or unpacks Debian's package into .cache/prometheus: nothing is installed in the system, and no service is
# started. Source it after make_environment.sh: it exports PROMETHEUS, empty where there is none, and why it is so is said.
set -euo pipefail

PROMETHEUS="${PROMETHEUS:-$(command -v prometheus || true)}"
export PROMETHEUS

distill_rl_unpack_prometheus() {
    local folder="$DISTILL_RL_ROOT/.cache/prometheus"
    if [[ ! -x $folder/usr/bin/prometheus ]]; then
        command -v apt-get >/dev/null || { echo "no apt-get"; return; }
        mkdir -p -- "$folder"
        (
            cd -- "$folder" &&
                { apt-get --quiet download prometheus || { apt-get --quiet update && apt-get --quiet download prometheus; }; } &&
                dpkg-deb --extract prometheus_*.deb . && rm -f -- prometheus_*.deb
        ) >"$folder/download.log" 2>&1 || { tail -n 1 -- "$folder/download.log"; return; }
    fi
    PROMETHEUS="$folder/usr/bin/prometheus"
}

if [[ -z $PROMETHEUS ]]; then
    why="$DISTILL_RL_ROOT/.cache/prometheus.why"
    mkdir -p -- "${why%/*}"
    distill_rl_unpack_prometheus >"$why"
    [[ -n $PROMETHEUS ]] || echo "setup-prometheus: there is none, and Debian's cannot be had: $(cat -- "$why")" >&2
fi
