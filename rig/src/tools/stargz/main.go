// What benches need of stargz-snapshotter. Without containerd: `convert` makes an eStargz layer, as `ctr-remote images
// optimize` does with the files that were recorded, and `serve` mounts layers, as the snapshotter does when an image is
// pulled. For containerd: `snapshotter` is containerd-stargz-grpc with its default settings.
package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	api "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/pkg/reference"
	"github.com/containerd/log"
	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/containerd/stargz-snapshotter/fs"
	"github.com/containerd/stargz-snapshotter/fs/config"
	"github.com/containerd/stargz-snapshotter/fs/source"
	"github.com/containerd/stargz-snapshotter/service"
	"github.com/containerd/stargz-snapshotter/snapshot"
	"google.golang.org/grpc"
)

// layer is a layer in a registry, and the empty folder where it is mounted.
type layer struct {
	Digest string `json:"digest"`
	TOC    string `json:"toc"`
	Folder string `json:"folder"`
}

// image is the body of a request.
type image struct {
	Reference string  `json:"reference"`
	Layers    []layer `json:"layers"`
}

func main() {
	var err error
	switch {
	case len(os.Args) == 5 && os.Args[1] == "convert":
		err = convert(os.Args[2], os.Args[3], os.Args[4])
	case len(os.Args) == 4 && os.Args[1] == "serve":
		err = serve(os.Args[2], os.Args[3], false)
	case len(os.Args) == 5 && os.Args[1] == "serve" && os.Args[4] == "https":
		err = serve(os.Args[2], os.Args[3], true)
	case len(os.Args) == 4 && os.Args[1] == "snapshotter":
		err = snapshotter(os.Args[2], os.Args[3])
	default:
		err = fmt.Errorf("convert LAYER FIRST ESTARGZ | serve FOLDER prefetch|none|record [https] | snapshotter FOLDER SOCKET")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "stargz:", err)
		os.Exit(1)
	}
}

// convert writes a layer as eStargz; the files that the list `first` names, one a line, are what is prefetched. It prints
// the digest of its table of contents.
func convert(from, first, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	info, err := source.Stat()
	if err != nil {
		return err
	}
	list, err := os.ReadFile(first)
	if err != nil {
		return err
	}
	var absent, wanted []string
	if names := strings.TrimSpace(string(list)); names != "" {
		wanted = strings.Split(names, "\n")
	}
	blob, err := estargz.Build(io.NewSectionReader(source, 0, info.Size()),
		estargz.WithPrioritizedFiles(wanted), estargz.WithAllowPrioritizeNotFound(&absent))
	if err != nil {
		return err
	}
	defer blob.Close()
	target, err := os.Create(to)
	if err != nil {
		return err
	}
	if _, err := io.Copy(target, blob); err != nil {
		return err
	}
	if err := target.Close(); err != nil {
		return err
	}
	fmt.Println(blob.TOCDigest())
	return nil
}

// secure returns the hosts of registries on loopback that need TLS, with any certificate, and perhaps a token.
func secure(name reference.Spec) ([]docker.RegistryHost, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	client := &http.Client{Transport: transport}
	authorizer := docker.NewDockerAuthorizer(docker.WithAuthClient(client))
	hosts := docker.ConfigureDefaultRegistries(docker.WithClient(client), docker.WithAuthorizer(authorizer),
		docker.WithPlainHTTP(func(string) (bool, error) { return false, nil }))
	return hosts(name.Hostname())
}

// serve mounts what it is asked for over HTTP, on a socket below `root`.
func serve(root, mode string, isSecure bool) error {
	if mode == "record" {
		// It says which files are opened, in this order.
		log.SetLevel("debug")
	}
	var options []fs.Option
	if isSecure {
		options = append(options, fs.WithGetSources(source.FromDefaultLabels(secure)))
	}
	// Whole layers are not fetched in the background: a start alone is looked at. All else is as by default.
	filesystem, err := fs.NewFilesystem(root, config.Config{
		NoPrefetch:           mode != "prefetch",
		NoBackgroundFetch:    true,
		NoPrometheus:         true,
		LogFileAccess:        mode == "record",
		DirectoryCacheConfig: config.DirectoryCacheConfig{Direct: true},
	}, options...)
	if err != nil {
		return err
	}
	listener, err := net.Listen("unix", filepath.Join(root, "socket"))
	if err != nil {
		return err
	}
	return http.Serve(listener, http.HandlerFunc(func(answer http.ResponseWriter, request *http.Request) {
		var wanted image
		err := json.NewDecoder(request.Body).Decode(&wanted)
		if err == nil {
			err = mount(filesystem, wanted)
		}
		if err != nil {
			http.Error(answer, err.Error(), http.StatusInternalServerError)
		}
	}))
}

// snapshotter serves containerd at a socket.
func snapshotter(root, socket string) error {
	var settings service.Config
	settings.NoPrometheus = true
	snapshotter, err := service.NewStargzSnapshotterService(context.Background(), root, &settings)
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

func mount(filesystem snapshot.FileSystem, wanted image) error {
	ctx := context.Background()
	var digests []string
	for _, it := range wanted.Layers {
		digests = append(digests, it.Digest)
	}
	labels := func(it layer) map[string]string {
		return map[string]string{
			"containerd.io/snapshot/remote/stargz.reference": wanted.Reference,
			"containerd.io/snapshot/remote/stargz.digest":    it.Digest,
			"containerd.io/snapshot/remote/stargz.layers":    strings.Join(digests, ","),
			estargz.TOCJSONDigestAnnotation:                  it.TOC,
		}
	}
	for _, it := range wanted.Layers {
		if err := filesystem.Mount(ctx, it.Folder, labels(it)); err != nil {
			return err
		}
	}
	// What the snapshotter does before a container is made: it waits until all is prefetched.
	for _, it := range wanted.Layers {
		if err := filesystem.Check(ctx, it.Folder, labels(it)); err != nil {
			return err
		}
	}
	return nil
}
