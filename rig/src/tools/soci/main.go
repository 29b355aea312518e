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
	"github.com/containerd/containerd/v2/pkg/namespaces"
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

// inNamespace has what the snapshotter asks of containerd's content store asked in the namespace of the call.
func inNamespace(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	if namespace, ok := namespaces.Namespace(ctx); ok {
		ctx = namespaces.WithNamespace(ctx, namespace)
	}
	return handle(ctx, request)
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
	server := grpc.NewServer(grpc.UnaryInterceptor(inNamespace))
	api.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(snapshotter))
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	return server.Serve(listener)
}
