package main

import (
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/component-base/cli"
	"sigs.k8s.io/metrics-server/cmd/metrics-server/app"
)

func init() {
	programs["metrics-server"] = func() int {
		return cli.Run(app.NewMetricsServerCommand(genericapiserver.SetupSignalHandler()))
	}
}
