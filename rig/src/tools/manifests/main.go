// Decodes manifests with Kubernetes' own types, strictly, and prints the objects as a list in JSON. Renders a chart with
// Helm's own engine before that, if the argument is a directory: `manifests FILE|CHART [VALUE=…]`.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"sort"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/strvals"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	node "k8s.io/api/node/v1"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// object returns an empty object of a kind. A kind that is not here is an error, so that no object is left unchecked.
func object(kind, version string) (any, error) {
	switch version + " " + kind {
	case "apps/v1 DaemonSet":
		return &apps.DaemonSet{}, nil
	case "v1 ConfigMap":
		return &core.ConfigMap{}, nil
	case "v1 ServiceAccount":
		return &core.ServiceAccount{}, nil
	case "node.k8s.io/v1 RuntimeClass":
		return &node.RuntimeClass{}, nil
	}
	return nil, fmt.Errorf("unexpected kind %s %s", version, kind)
}

// decode reads all documents of a file.
func decode(text []byte) ([]any, error) {
	reader := yamlutil.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	objects := []any{}
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		var head struct {
			Kind       string `json:"kind"`
			APIVersion string `json:"apiVersion"`
		}
		if err := yaml.Unmarshal(document, &head); err != nil {
			return nil, err
		}
		if head.Kind == "" {
			// Only comments.
			continue
		}
		into, err := object(head.Kind, head.APIVersion)
		if err != nil {
			return nil, err
		}
		// Unknown fields, and fields that occur twice, are errors.
		if err := yaml.UnmarshalStrict(document, into); err != nil {
			return nil, fmt.Errorf("%s: %w", head.Kind, err)
		}
		objects = append(objects, into)
	}
}

// render returns the manifests of a chart, in the order of its files.
func render(dir string, values []string) ([]byte, error) {
	chart, err := loader.LoadDir(dir)
	if err != nil {
		return nil, err
	}
	if err := chart.Validate(); err != nil {
		return nil, err
	}
	own := map[string]any{}
	for _, value := range values {
		if err := strvals.ParseInto(value, own); err != nil {
			return nil, err
		}
	}
	release := chartutil.ReleaseOptions{Name: "quire", Namespace: "kube-system", Revision: 1, IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, own, release, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	// Without `Strict`, values that do not exist are empty.
	rendered, err := engine.Engine{Strict: true}.Render(chart, all)
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(rendered))
	for name := range rendered {
		if ext := path.Ext(name); ext == ".yaml" {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	var text bytes.Buffer
	for _, name := range names {
		fmt.Fprintf(&text, "---\n%s\n", rendered[name])
	}
	return text.Bytes(), nil
}

func run() error {
	if len(os.Args) < 2 {
		return errors.New("usage: manifests FILE|CHART [VALUE=…]")
	}
	found, err := os.Stat(os.Args[1])
	if err != nil {
		return err
	}
	var text []byte
	if found.IsDir() {
		text, err = render(os.Args[1], os.Args[2:])
	} else {
		text, err = os.ReadFile(os.Args[1])
	}
	if err != nil {
		return err
	}
	objects, err := decode(text)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(objects)
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "manifests:", err)
		os.Exit(1)
	}
}
