// containerd's own tests of snapshotters, against `quire serve --snapshotter`. Each test has a store and a service of its own.
package suite

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// service is a snapshotter, and what ends it.
type service struct {
	snapshots.Snapshotter
	connection *grpc.ClientConn
}

// Close may be called twice.
func (s *service) Close() error {
	if err := s.connection.Close(); err != nil && !strings.Contains(err.Error(), "closing") {
		return err
	}
	return nil
}

func start(_ context.Context, root string) (snapshots.Snapshotter, func() error, error) {
	socket := filepath.Join(root, "s")
	command := exec.Command(os.Getenv("QUIRE"), "--store", filepath.Join(root, "store"),
		"serve", "--snapshotter", "--socket", socket)
	command.Stderr = os.Stderr
	output, err := command.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := command.Start(); err != nil {
		return nil, nil, err
	}
	// The line that it is ready.
	if _, err := bufio.NewReader(output).ReadString('\n'); err != nil {
		return nil, nil, errors.Join(err, command.Wait())
	}
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	client := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(connection), "quire")
	end := func() error {
		connection.Close()
		if err := command.Process.Signal(syscall.SIGTERM); err != nil {
			return err
		}
		time.AfterFunc(30*time.Second, func() { command.Process.Kill() })
		if err := command.Wait(); err != nil {
			return fmt.Errorf("the service ended with %w", err)
		}
		return unmount(root)
	}
	return &service{client, connection}, end, nil
}

// unmount takes down the roots of snapshots that a test has left.
func unmount(root string) error {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	lines := strings.Split(string(table), "\n")
	for at := len(lines) - 1; at >= 0; at-- {
		fields := strings.Fields(lines[at])
		if len(fields) > 4 && strings.HasPrefix(fields[4], root+"/") {
			if err := syscall.Unmount(fields[4], syscall.MNT_DETACH); err != nil {
				return err
			}
		}
	}
	return nil
}

func TestSuite(t *testing.T) {
	testsuite.SnapshotterSuite(t, "quire", start)
}
