// What a bench needs of soci-snapshotter, whose module of programs is in no release: soci-snapshotter-grpc, with the settings
// of a file.
package main

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/awslabs/soci-snapshotter/config"
	"github.com/awslabs/soci-snapshotter/service"
	api "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"google.golang.org/grpc"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "soci: SETTINGS FOLDER SOCKET")
		os.Exit(2)
	}
	if err := serve(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "soci:", err)
		os.Exit(1)
	}
}

func serve(file, root, socket string) error {
	settings, err := config.NewConfigFromToml(file)
	if err != nil {
		return err
	}
	snapshotter, err := service.NewSociSnapshotterService(context.Background(), root, &settings.ServiceConfig)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(snapshotter))
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	return server.Serve(listener)
}
