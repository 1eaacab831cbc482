#!/usr/bin/env bash
# Finds Prometheus, or unpacks Debian's package into .cache/prometheus, without installing it or starting a service. Source it
# after make_environment.sh: it exports PROMETHEUS; if Prometheus cannot be had, that is empty, and the reason is printed.
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
    reason="$DISTILL_RL_ROOT/.cache/prometheus.why"
    mkdir -p -- "${reason%/*}"
    distill_rl_unpack_prometheus >"$reason"
    [[ -n $PROMETHEUS ]] || echo "setup-prometheus: Prometheus is not installed, and Debian's package cannot be downloaded: $(cat -- "$reason")" >&2
fi
