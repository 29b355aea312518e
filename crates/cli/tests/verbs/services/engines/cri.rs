//! Pods, which containerd runs as kubelet requests them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use store::{OpenOptions, Store, Who};
use testing::daemon::Daemon;
use testing::fake::{Server, forward, wait_for};

use super::{
    Containerd, Engine, EnginePlace, NEWEST, archive, archive_of, engine_place, snapshotter,
};
use crate::{Place, Ran};

/// Kubernetes' own client, crictl.
pub(super) struct Client {
    program: PathBuf,
    runtime: PathBuf,
    images: PathBuf,
}

impl Client {
    /// Uses containerd for the runtime and for images.
    pub(super) fn new(program: PathBuf, engine: &Containerd) -> Self {
        Self { program, runtime: engine.socket.clone(), images: engine.socket.clone() }
    }

    fn run(&self, words: &[&str]) -> Ran {
        let [runtime, images] =
            [&self.runtime, &self.images].map(|it| format!("unix://{}", it.display()));
        let mut command = Command::new(&self.program);
        command.args(["--runtime-endpoint", &runtime, "--image-endpoint", &images]);
        Ran::from_output(&command.args(["--timeout", "60s"]).args(words).output().unwrap())
    }

    pub(super) fn out(&self, words: &[&str]) -> String {
        let ran = self.run(words);
        assert_eq!(ran.code, Some(0), "crictl {words:?}: {}{}", ran.out, ran.err);
        ran.out.trim().to_owned()
    }

    /// Runs a container that waits, in a separate pod. Returns the ids of both.
    fn run_pod(&self, place: &Place, image: &str) -> (String, String) {
        self.run_pod_by(place, image, "", &image.len().to_string())
    }

    /// Like `run_pod`, by this runtime of the engine, and with a part of the pod's name.
    pub(super) fn run_pod_by(
        &self,
        place: &Place,
        image: &str,
        runtime: &str,
        name: &str,
    ) -> (String, String) {
        let [pod, container] = ["pod.json", "container.json"].map(|it| place.path(it));
        let id = format!("quire-test-{}-{name}", std::process::id());
        write(
            &pod,
            &json!({
                "metadata": {"name": id, "namespace": "default", "uid": id, "attempt": 1},
                "log_directory": place.folder.path(),
                // Use the host's network, so that no network plugin is needed.
                "linux": {"security_context": {"namespace_options": {"network": 2}}}
            }),
        );
        write(
            &container,
            &json!({
                "metadata": {"name": "one"},
                "image": {"image": image},
                "command": ["/bin/sleep", "1000"],
                "log_path": "one.log",
                "linux": {}
            }),
        );
        let [pod, container] = [&pod, &container].map(|it| it.to_str().unwrap());
        let pod_id = self.out(&["runp", "--runtime", runtime, pod]);
        let container = self.out(&["create", &pod_id, container, pod]);
        self.out(&["start", &container]);
        (pod_id, container)
    }

    pub(super) fn end_pod(&self, pod: &str) {
        self.out(&["stopp", pod]);
        self.out(&["rmp", pod]);
    }

    pub(super) fn json(&self, words: &[&str]) -> Value {
        let (verb, rest) = words.split_first().unwrap();
        let words = [&[*verb, "--output", "json"], rest].concat();
        serde_json::from_str(&self.out(&words)).unwrap()
    }
}

/// Parses a number, which is text in protobuf's JSON.
fn number(value: &Value) -> u64 {
    value["value"].as_str().and_then(|it| it.parse().ok()).unwrap_or(0)
}

/// Returns settings of containerd for pods on a machine where root lacks some rights.
pub(super) fn settings(place: &Place, pause: &str) -> String {
    let network = place.path("net.d");
    fs::create_dir(&network).unwrap();
    let list = json!({"cniVersion": "1.0.0", "name": "lo", "plugins": [{"type": "loopback"}]});
    fs::write(network.join("1-lo.conflist"), list.to_string()).unwrap();
    let images = r#"plugins."io.containerd.cri.v1.images""#;
    format!(
        "[plugins.\"io.containerd.cri.v1.runtime\"]\nrestrict_oom_score_adj = true\n\
         [plugins.\"io.containerd.cri.v1.runtime\".cni]\nconf_dir = {network:?}\n\
         [{images}.pinned_images]\nsandbox = {pause:?}\n\
         [{images}.registry]\nconfig_path = {:?}\n",
        place.path("certs.d")
    )
}

/// Starts the newest containerd with support for pods, whose images come from this registry.
pub(super) fn start(
    place: &Place,
    containerd: &Path,
    socket: &Path,
    host: &str,
    pause: &str,
) -> Containerd {
    let folder = place.path("certs.d").join(host);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("hosts.toml"), format!("[host.\"http://{host}\"]\n")).unwrap();
    let (programs, tables) = (containerd.parent().unwrap(), settings(place, pause));
    Containerd::start_with(place, Engine::NewestWithDiffer, programs, socket, "", &tables)
}

pub(super) fn write(path: &Path, value: &Value) {
    fs::write(path, value.to_string()).unwrap();
}

/// Makes an image for pods that only waits.
pub(super) fn pause_image(maker: &Place) {
    let change = r#"CMD ["/bin/sleep", "1000"]"#;
    let ran = maker.run_each(&["commit", "--change", change, "changed", "pause:1"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
}

/// `quire pull` has stored the image, so only manifest and config are fetched. Disk usage is reported as kubelet
/// needs it.
#[test]
fn pods_run_and_kubelet_sees_what_they_use() {
    let Some(containerd) = testing::built(NEWEST, "containerd", "containerd") else { return };
    let Some(crictl) = testing::built("crictl-", "crictl", "crictl") else { return };
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let maker = Place::new();
    let Some(registry) = Daemon::start(maker.folder.path(), "").unwrap() else {
        return testing::skipped("docker-registry is not installed");
    };
    archive(&maker);
    pause_image(&maker);
    let upstream = registry.host.clone();
    let server = Server::start(move |request, _| forward(&upstream, request, 0).unwrap());
    let [image, pause] = ["image", "pause"].map(|it| format!("{}/{it}:1", server.host()));
    for name in ["image", "pause"] {
        maker.out(&format!("push {name}:1 {}/{name}:1", registry.host));
    }
    place.out(&format!("pull {image}"));
    let before = server.seen().len();
    let socket = place.path("snapshotter");
    let mut service = snapshotter(place, &socket, &["--skip", "download"]);
    let engine = start(place, &containerd, &socket, &server.host(), &pause);
    let client = Client::new(crictl, &engine);

    client.out(&["pull", &image]);
    let fetched: Vec<_> = server.lines().drain(before..).collect();
    let blobs = fetched.iter().filter(|it| it.contains("/blobs/")).count();
    // This is the blob of the config.
    assert_eq!(blobs, 1, "{fetched:?}");

    let (pod_id, container) = client.run_pod(place, &image);
    assert_eq!(client.out(&["exec", &container, "/bin/cat", "/etc/short"]), "changed");

    // kubelet reads the usage of this disk, and removes images if it is too high.
    let store = place.path("store").canonicalize().unwrap();
    let info = client.json(&["imagefsinfo"]);
    let found = info["status"]["imageFilesystems"][0]["fsId"]["mountpoint"].as_str();
    let found = found.and_then(|it| Path::new(it).canonicalize().ok());
    assert_eq!(found.as_ref(), Some(&store), "{info}");
    let written = || {
        let stats = client.json(&["stats", &container]);
        number(&stats["stats"][0]["writableLayer"]["usedBytes"])
    };
    let before = written();
    let script = "i=0; while [ $i -lt 10000 ]; do echo 0123456789012345678901234567890123456789; i=$((i+1)); done > /big";
    client.out(&["exec", &container, "/bin/sh", "-c", script]);
    wait_for("what was written is counted", || written() >= before + 400_000);

    client.end_pod(&pod_id);
    for image in [&image, &pause] {
        client.out(&["rmi", image]);
    }
    let none =
        || engine.out("--namespace k8s.io snapshot --snapshotter quire ls").lines().count() == 1;
    wait_for("no snapshot is left", none);
    assert!(service.end().success());
    assert!(place.out("fsck").starts_with("sound"));
}

/// The password, its user's line in the form of crypt(3), and both as printed by `printf me:open-sesame | base64`.
const PASSWORD: &str = "open-sesame";
const USERS: &str = "me:$2b$05$TYQndf3peGt.JQzdiNw8PuMddQE2xVcVXBHEcGw2DoSuW3noVNBl2\n";
const AUTH: &str = "bWU6b3Blbi1zZXNhbWU=";

/// Only kubelet has the credentials on this machine.
#[test]
fn a_pull_secret_is_enough_to_start_before_the_layers_are_here() {
    let Some(containerd) = testing::built(NEWEST, "containerd", "containerd") else { return };
    let Some(crictl) = testing::built("crictl-", "crictl", "crictl") else { return };
    let Some(EnginePlace(place)) = &engine_place() else { return };
    if !crate::services::fuse_devices::can_serve() {
        return;
    }
    let maker = Place::new();
    let users = maker.path("htpasswd");
    fs::write(&users, USERS).unwrap();
    let settings_of = format!("auth: {{htpasswd: {{realm: x, path: \"{}\"}}}}\n", users.display());
    let Some(registry) = Daemon::start(maker.folder.path(), &settings_of).unwrap() else {
        return testing::skipped("docker-registry is not installed");
    };
    let tree = maker.tree("tree", "long ");
    fs::write(tree.join("large"), testing::noise(40 << 20)).unwrap();
    archive_of(&maker, &tree);
    // This image shares no layer with the other one.
    let other = Place::new();
    archive(&other);
    pause_image(&other);
    let auths = json!({"auths": {(registry.host.clone()): {"auth": AUTH}}});
    write(&maker.path("auth.json"), &auths);
    let (image, pause) =
        (format!("{}/image:1", registry.host), format!("{}/pause:1", registry.host));
    for line in [
        format!("push --authfile auth.json image:1 {image}"),
        format!("pull --authfile auth.json --quiet --form tar --keep-layers {image}"),
        format!("index --authfile auth.json --push {image} {image}"),
    ] {
        maker.out(&line);
    }
    let authfile = maker.path("auth.json");
    other.out(&format!("push --authfile {} pause:1 {pause}", authfile.display()));

    let (socket, images) = (place.path("snapshotter"), place.path("images"));
    let file = place.path("serve.toml");
    let text = format!(
        "[snapshotter]\nskip = \"download\"\nlazy = true\ntrust-index = \"repository\"\nimage-service = {images:?}\n"
    );
    fs::write(&file, text).unwrap();
    let mut service = snapshotter(place, &socket, &["--config", file.to_str().unwrap()]);
    let engine = start(place, &containerd, &socket, &registry.host, &pause);
    let client = Client { program: crictl, runtime: engine.socket.clone(), images };
    let refused = client.run(&["pull", &image]);
    assert_ne!(refused.code, Some(0), "{}", refused.out);
    let folder = serve::lazy::folder_of(&place.path("store")).unwrap();
    let secrets = folder.with_extension("secrets");
    // Credentials that the registry rejects are not kept.
    let wrong = client.run(&["pull", "--creds", "me:wrong", &image]);
    // The engine's error message is passed on.
    assert!(wrong.code != Some(0) && wrong.err.contains("401"), "{}{}", wrong.out, wrong.err);
    assert!(!fs::read_to_string(&secrets).unwrap_or_default().contains("\"auth\""));
    let creds = format!("me:{PASSWORD}");
    for image in [&pause, &image] {
        client.out(&["pull", "--creds", &creds, image]);
    }
    let kept = fs::metadata(&secrets).unwrap();
    assert_eq!(kept.permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_to_string(&secrets).unwrap().matches(AUTH).count(), 2);
    let (pod, container) = client.run_pod(place, &image);
    assert_eq!(client.out(&["exec", &container, "/bin/cat", "/etc/short"]), "changed");
    // Only data that was read was downloaded.
    let [used, whole] = [place, &maker].map(data);
    assert!(used < whole / 2, "{used} of {whole} bytes");
    client.end_pod(&pod);
    for image in [&image, &pause] {
        client.out(&["rmi", image]);
    }
    assert!(service.end().success());
    place.out("serve --lazy --stop");
    for file in [secrets, folder.with_extension("secrets-lock")] {
        fs::remove_file(file).unwrap();
    }
}

/// Returns the bytes on disk of objects and devices.
fn data(place: &Place) -> u64 {
    let store = Store::open(&place.path("store"), Who::this_process(), OpenOptions::read());
    let used = store.unwrap().du().unwrap();
    used.data + used.objects
}
