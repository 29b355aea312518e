//! The manifests for Kubernetes, decoded by Kubernetes' own types, and the chart, rendered by Helm's own engine.

use serde_json::{Value, json};
use testing::documents::repository;

use super::*;

/// Returns the objects of a manifest or of a chart, decoded strictly.
pub(super) fn objects(words: &[&str]) -> Option<Vec<Value>> {
    let program = testing::built("kubernetes-manifests-", "manifests", "manifests")?;
    let mut command = Command::new(program);
    command.args(words).current_dir(repository().join("dist/kubernetes"));
    let ran = Ran::from_output(&command.output().unwrap());
    assert_eq!(ran.code, Some(0), "manifests {words:?}: {}", ran.err);
    Some(serde_json::from_str(&ran.out).unwrap())
}

/// Returns the object of a kind.
pub(super) fn of_kind(objects: &[Value], kind: &str) -> Value {
    let mut found = objects.iter().filter(|it| it["kind"] == kind);
    let object = found.next().unwrap_or_else(|| panic!("no {kind} in {objects:?}"));
    assert_eq!(found.count(), 0, "several {kind}");
    object.clone()
}

fn container(daemon_set: &Value) -> Value {
    let containers = daemon_set["spec"]["template"]["spec"]["containers"].as_array().unwrap();
    assert_eq!(containers.len(), 1, "{containers:?}");
    containers[0].clone()
}

#[test]
fn manifests_are_what_kubernetes_and_helm_read() {
    let Some(plain) = objects(&["quire.yaml"]) else { return };
    assert_eq!(plain.len(), 2, "{plain:?}");
    let sorted = |objects: Vec<Value>| {
        let mut objects = objects;
        objects.sort_by_key(|it| it["kind"].to_string());
        objects
    };
    let chart = sorted(objects(&["chart"]).unwrap());
    assert_eq!(chart, sorted(plain.clone()), "left: the chart; right: quire.yaml");

    let daemon_set = of_kind(&plain, "DaemonSet");
    let selector = &daemon_set["spec"]["selector"]["matchLabels"];
    assert_eq!(selector, &daemon_set["spec"]["template"]["metadata"]["labels"]);
    let container = container(&daemon_set);
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        assert_eq!(container[probe]["httpGet"]["path"], "/healthz", "{probe}");
        assert_eq!(container[probe]["httpGet"]["port"], container["ports"][0]["containerPort"]);
    }
    for part in ["requests", "limits"] {
        assert!(container["resources"][part]["memory"].is_string(), "{part}");
    }
    // Every volume is mounted, and every mount has a volume.
    let names = |list: &Value| {
        let list = list.as_array().unwrap().iter();
        list.map(|it| it["name"].as_str().unwrap().to_owned()).collect::<BTreeSet<_>>()
    };
    let volumes = names(&daemon_set["spec"]["template"]["spec"]["volumes"]);
    assert_eq!(names(&container["volumeMounts"]), volumes);
    let class = of_kind(&plain, "RuntimeClass");
    assert_eq!((&class["metadata"]["name"], &class["handler"]), (&json!("quire"), &json!("quire")));
}

/// The command of the container parses, with these values as well.
#[test]
fn values_of_the_chart_reach_the_service() {
    let values = [
        "chart",
        "image.repository=registry.example.com/quire",
        "image.tag=1",
        "engine.directory=/run/k3s/containerd",
        "store=/srv/quire",
        "gcAbove=70",
        "metrics.address=0.0.0.0",
        "metrics.port=9999",
        "metrics.remote=true",
        "options={--skip=download}",
        "runtimeClass.create=false",
        "pullSecrets[0].name=own",
    ];
    let Some(objects) = objects(&values) else { return };
    let [daemon_set] = &objects[..] else { panic!("{objects:?}") };
    let container = container(daemon_set);
    assert_eq!(container["image"], "registry.example.com/quire:1");
    let expected = [
        "/usr/bin/quire",
        "--store=/srv/quire",
        "serve",
        "--snapshotter",
        "--engine=/run/k3s/containerd/containerd.sock",
        "--gc-above=70",
        "--metrics=0.0.0.0:9999",
        "--metrics-remote",
        "--skip=download",
    ];
    assert_eq!(container["command"], json!(expected));
    // All addresses of a node include this one, which kubelet reaches.
    assert_eq!(container["livenessProbe"]["httpGet"]["host"], "127.0.0.1");
    assert_eq!(container["livenessProbe"]["httpGet"]["port"], 9999);
    let spec = &daemon_set["spec"]["template"]["spec"];
    assert_eq!(spec["imagePullSecrets"], json!([{"name": "own"}]));
    // An unknown option would be an error before anything else.
    let place = Place::new();
    let words = [&expected[1..], &["--print-config=containerd"]].concat();
    let ran = place.run_each(&words);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
}

/// Kubelet puts brackets around an address of IPv6 itself.
#[test]
fn probes_of_the_chart_reach_the_address_of_the_metrics() {
    let place = Place::new();
    for (address, host) in [
        ("127.0.0.1", "127.0.0.1"),
        ("192.0.2.7", "192.0.2.7"),
        ("0.0.0.0", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[2001:db8::7]", "2001:db8::7"),
        ("[::]", "::1"),
    ] {
        let value = format!("metrics.address={address}");
        let Some(objects) = objects(&["chart", &value, "metrics.remote=true"]) else { return };
        let container = container(&of_kind(&objects, "DaemonSet"));
        for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
            assert_eq!(container[probe]["httpGet"]["host"], host, "{address} {probe}");
        }
        let words = container["command"].as_array().unwrap().iter();
        let words: Vec<_> = words.map(|it| it.as_str().unwrap()).collect();
        assert!(words.contains(&&*format!("--metrics={address}:9110")), "{words:?}");
        let ran = place.run_each(&[&words[1..], &["--print-config=containerd"]].concat());
        assert_eq!(ran.code, Some(0), "{address}: {}", ran.err);
    }
}

/// Without the tools of Kubernetes, the options of the plain manifest are still checked.
#[test]
fn options_of_the_manifest_are_those_of_the_service() {
    let text = fs::read_to_string(repository().join("dist/kubernetes/quire.yaml")).unwrap();
    let (_, after) = text.split_once("command:\n").unwrap();
    let words: Vec<_> = after.lines().map_while(|it| it.trim().strip_prefix("- ")).collect();
    assert_eq!(words[..3], ["/usr/bin/quire", "serve", "--snapshotter"]);
    let ran = Place::new().run_each(&[&words[1..], &["--print-config=containerd"]].concat());
    assert_eq!(ran.code, Some(0), "{words:?}: {}", ran.err);
}
