#!/bin/sh
# Records a real node for docs/observe.md and docs/oom.md, on cgroup v2 in the virtual machine:
#
#   cp docs/record-node.sh DIR/
#   cargo xtask vm run --share DIR -- sh /share/record-node.sh
#
# It leaves in DIR: node.jsonl (keblet observe --json), oom.txt (keblet oom), pressure.txt (keblet pressure), and in
# verdicts.txt the lines of the agent's log about OOM kills. docs/observe.jsonl is such a node.jsonl, from which
# docs/observe.md draws the pictures.
set -eu
out="${1:-/share}"
dir="$(mktemp -d)"
mkfifo "$dir/commands"
private-containerd < "$dir/commands" > "$dir/ready" &
runtime=$!
# The end of its input ends the runtime and removes the pods.
exec 3> "$dir/commands"
until grep -q socket "$dir/ready"; do
    kill -0 "$runtime"
    sleep 1
done
field() { sed -n "1s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" "$dir/ready"; }
files="$(field dir)" endpoint="unix://$(field socket)"
mkdir -p "$files/manifests" "$files/kubelet" "$files/pod-logs"

# pod NAME IMAGE RESOURCES WORD...: the manifest of a static pod with one container.
pod() {
    name="$1" image="$2" resources="$3"
    shift 3
    words="$(printf ', "%s"' "$@")"
    cat > "$files/manifests/$name.json" << EOF
{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "$name", "namespace": "shop"}, "spec": {"hostNetwork": true,
 "terminationGracePeriodSeconds": 2, "containers": [{"name": "main", "image": "keblet.local/$image:1",
 "imagePullPolicy": "Never", "command": [${words#, }], "resources": $resources}]}}
EOF
}
pod web probe '{}' /probe run
pod cart busybox '{"limits": {"memory": "48Mi"}}' sh -c 'while true; do tail /dev/zero; sleep 15; done'
pod report busybox '{"limits": {"cpu": "200m"}}' sh -c 'while true; do :; done'
pod crash probe '{}' /probe exit --code 3 --after-ms 3000

# Without singleProcessOOMKill the kernel kills the whole container, and not the child alone.
cat > "$files/config.json" << EOF
{"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration", "containerRuntimeEndpoint": "$endpoint",
 "staticPodPath": "$files/manifests", "podLogsDir": "$files/pod-logs", "cgroupRoot": "$(field cgroup_root)",
 "cgroupDriver": "cgroupfs", "enforceNodeAllocatable": [], "evictionHard": {}, "failSwapOn": false,
 "singleProcessOOMKill": true, "makeIPTablesUtilChains": false, "volumePluginDir": "$files/kubelet/plugins",
 "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
 "authorization": {"mode": "AlwaysAllow"}, "imageGCHighThresholdPercent": 100}
EOF
keblet run --hostname-override node-1 --config "$files/config.json" --root-dir "$files/kubelet" \
    --cert-dir "$files/kubelet/pki" > "$dir/agent.log" 2>&1 &
agent=$!
observe="--node-name node-1 --container-runtime-endpoint $endpoint"
keblet observe --json --interval 5s $observe > "$out/node.jsonl" &
sleep 180
keblet oom $observe > "$out/oom.txt"
keblet pressure $observe > "$out/pressure.txt"
grep -E 'OomKilled|OOMKilled' "$dir/agent.log" > "$out/verdicts.txt" || echo "no OOM kill was recorded" >&2
kill $! "$agent"
wait "$agent" || true
exec 3>&-
wait "$runtime"
