package main

import (
	"k8s.io/component-base/cli"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
)

func init() {
	programs["kubectl"] = func() int {
		if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
			// Prints the error and ends the process with the code that belongs to it.
			util.CheckErr(err)
		}
		return 0
	}
}
