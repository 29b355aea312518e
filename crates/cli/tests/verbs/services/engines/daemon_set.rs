//! The pod of the DaemonSet in `dist/kubernetes`, unchanged, which a kubelet without a cluster runs.

use serde_json::{Value, json};

use super::cri::{Client, pause_image, settings, write};
use super::kubelet::Kubelet;
use super::manifests::{objects, of_kind};
use super::*;
use crate::container_disk::writable::has;

/// The manifest has fixed paths and a fixed port. In these namespaces, they belong to the test: `/run` and `/var/lib`
/// are new, changes of `/etc` go to a folder of the test, and there is only loopback. The mounts are shared below `/`,
/// as on a node, but with no other namespace.
const NODE: &str = r#"
    base=$1; shift
    mount --make-rshared /
    mkdir -p "$base/lib/quire" "$base/etc.upper" "$base/etc.work"
    mount --bind "$base/lib" /var/lib
    mount -t overlay overlay -o "lowerdir=/etc,upperdir=$base/etc.upper,workdir=$base/etc.work" /etc
    mount -t tmpfs -o mode=755 tmpfs /run
    mkdir -p /run/quire /run/containerd /etc/quire
    # The name of the engine's socket in the test is another one.
    mount --bind "$base/../engine" /run/containerd
    ln -s socket /run/containerd/containerd.sock
    ip link set lo up
    exec "$@""#;

/// Returns a command that runs programs in the namespaces of a process.
fn beside(engine: &Containerd) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", &engine.pid().to_string(), "--mount", "--net", "--"]);
    command
}

/// Returns the id of the running container with a name.
fn running(client: &Client, name: &str) -> Option<String> {
    let found = client.json(&["ps", "--name", name]);
    let [container] = &found["containers"].as_array()?[..] else { return None };
    Some(container["id"].as_str()?.to_owned())
}

/// How often kubelet has logged that the service is ready.
fn ready(kubelet: &mut Kubelet) -> usize {
    let log = kubelet.logs(&[""]);
    let lines = log.lines().filter(|it| it.contains("probe=\"readiness\""));
    lines.filter(|it| it.contains("status=\"ready\"")).count()
}

#[test]
fn kubelet_runs_the_pod_of_the_daemon_set() {
    if !testing::long_tests() {
        return;
    }
    let Some(program) = testing::built("kubelet-", "kubelet", "kubelet") else { return };
    let Some(containerd) = testing::built(NEWEST, "containerd", "containerd") else { return };
    let Some(crictl) = testing::built("crictl-", "crictl", "crictl") else { return };
    let Some(plain) = objects(&["quire.yaml"]) else { return };
    let Some(EnginePlace(place)) = &engine_place() else { return };
    if !has(&["unshare", "ip", "nsenter"]) {
        return;
    }
    if !Path::new("/dev/kmsg").exists() {
        return testing::skipped("kubelet needs /dev/kmsg");
    }
    let daemon_set = of_kind(&plain, "DaemonSet");
    let template = &daemon_set["spec"]["template"];
    let image = template["spec"]["containers"][0]["image"].as_str().unwrap();
    let maker = Place::new();
    let tree = maker.tree("tree", "long ");
    let quire = Path::new(env!("CARGO_BIN_EXE_quire"));
    add_programs(&tree, &[quire.to_str().unwrap()]);
    fs::create_dir_all(tree.join("usr/bin")).unwrap();
    fs::copy(quire, tree.join("usr/bin/quire")).unwrap();
    archive_of(&maker, &tree);
    pause_image(&maker);
    let pause = "localhost/pause:1";
    for (name, tag) in [("image:1", image), ("pause:1", pause)] {
        maker.out(&format!("export --force {name} docker-archive:{}.tar:{tag}", &name[..5]));
    }

    fs::create_dir_all(place.path("engine")).unwrap();
    fs::create_dir(place.path("base")).unwrap();
    let mut node = Command::new("unshare");
    node.args(["--mount", "--net", "--propagation", "private", "sh", "-euc", NODE, "sh"]);
    let programs = containerd.parent().unwrap();
    node.arg(place.path("base")).arg(programs.join("containerd"));
    let socket = Path::new("/run/quire/snapshotter.sock");
    let tables = settings(place, pause);
    let (way, more) = (Engine::NewestForClass, "");
    let engine = Containerd::start_by(node, place, way, programs, socket, more, &tables);
    for name in ["image", "pause"] {
        let file = maker.path(&format!("{name}.tar"));
        engine.out(&format!(
            "--namespace k8s.io image import --snapshotter overlayfs {}",
            file.display()
        ));
    }
    let client = Client::new(crictl, &engine);
    let manifests = place.path("manifests");
    fs::create_dir(&manifests).unwrap();
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "spec": template["spec"].clone()});
    pod["metadata"] = template["metadata"].clone();
    let name = format!("quire-test-{}", std::process::id());
    pod["metadata"]["name"] = Value::String(name);
    pod["metadata"]["namespace"] = daemon_set["metadata"]["namespace"].clone();
    write(&manifests.join("pod.json"), &pod);
    // The disk of this machine may be full to any degree.
    let eviction = json!({
        "imagefs.available": "0%",
        "nodefs.available": "0%",
        "nodefs.inodesFree": "0%",
        "memory.available": "0%",
    });
    let mut kubelet =
        Kubelet::start(beside(&engine), place, &program, &engine.socket, &manifests, &eviction);
    wait_for("the service is ready", || ready(&mut kubelet) > 0);
    let service = running(&client, "quire").unwrap();

    let (first_pod, first) = client.run_pod_by(place, image, "quire", "first");
    let reads = |container: &str| client.out(&["exec", container, "/bin/cat", "/etc/short"]);
    assert_eq!(reads(&first), "changed");
    // The root is Quire's.
    let layers = place.path("base/lib/quire/layers");
    assert!(fs::read_dir(layers).unwrap().count() > 0);

    // The service starts again. The container has not noticed, and new ones start.
    let before = ready(&mut kubelet);
    client.out(&["stop", &service]);
    wait_for("the service is ready again", || {
        ready(&mut kubelet) > before && running(&client, "quire").is_some_and(|it| it != service)
    });
    assert_eq!(reads(&first), "changed");
    let (second_pod, second) = client.run_pod_by(place, image, "quire", "second");
    assert_eq!(reads(&second), "changed");
    for pod in [&first_pod, &second_pod] {
        client.end_pod(pod);
    }
    kubelet.process.end();
    let pods = client.json(&["pods"]);
    client.end_pod(pods["items"][0]["id"].as_str().unwrap());
}
