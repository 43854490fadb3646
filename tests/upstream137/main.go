// Upstream's kubelet 1.37 alone, the peer of benchmarks whose EventedPLEG asks the generic PLEG for a relist of one pod.
//
// Built by `cargo xtask peers` from published modules, beside the programs of tests/upstream; keblet takes nothing from
// it.
package main

import (
	"context"
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	os.Exit(cli.Run(app.NewKubeletCommand(context.Background())))
}
