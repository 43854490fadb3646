// Upstream's own programs in one binary that looks at the name it was called by.
//
// Each program has a file that enters it in the table below. They are peers in benchmarks and tests, built by
// `cargo xtask peers` from published modules; keblet takes nothing from them.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// programs maps the name a program is called by to its main function, which returns the exit code.
var programs = map[string]func() int{}

func main() {
	name := filepath.Base(os.Args[0])
	program, known := programs[name]
	if !known {
		names := make([]string, 0, len(programs))
		for name := range programs {
			names = append(names, name)
		}
		slices.Sort(names)
		fmt.Fprintf(os.Stderr, "%s: call me by one of these names: %v\n", name, names)
		os.Exit(64)
	}
	os.Exit(program())
}
