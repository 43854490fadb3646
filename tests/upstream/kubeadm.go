package main

import (
	"fmt"
	"os"

	kubeadm "k8s.io/kubernetes/cmd/kubeadm/app"
)

func init() {
	programs["kubeadm"] = func() int {
		if err := kubeadm.Run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
}
