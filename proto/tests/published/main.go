// Command published writes the published descriptor of the CRI, a binary
// FileDescriptorSet, to standard output.
package main

import (
	"fmt"
	"os"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func main() {
	file := protodesc.ToFileDescriptorProto((&cri.VersionRequest{}).ProtoReflect().Descriptor().ParentFile())
	set := &descriptorpb.FileDescriptorSet{File: []*descriptorpb.FileDescriptorProto{file}}
	raw, err := proto.Marshal(set)
	if err == nil {
		_, err = os.Stdout.Write(raw)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "published:", err)
		os.Exit(1)
	}
}
