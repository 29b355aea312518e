//! A kubelet without a cluster, whose only pod is a file on its node.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use testing::daemon::Daemon;
use testing::fake::wait_for;

use super::cri::{Client, pause_image, start, write};
use super::{EnginePlace, NEWEST, Service, archive_of, engine_place, snapshotter};
use crate::container_disk::writable::{has, plain_ext4};
use crate::{Place, add_programs};

/// kubelet sets some kernel variables, and uses folders at fixed paths. In this mount namespace, these are files and
/// folders of the test. Source: Kubernetes, `setupKernelTunables` in `pkg/kubelet/cm/container_manager_linux.go`.
const ISOLATED: &str = r#"
    folder=$1; shift
    for path in log lib; do
        mkdir "$folder/$path"
        mount --bind "$folder/$path" "/var/$path"
    done
    for path in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
        kernel/keys/root_maxkeys kernel/keys/root_maxbytes
    do
        copy=$folder/$(basename "$path")
        cat "/proc/sys/$path" > "$copy"
        mount --bind "$copy" "/proc/sys/$path"
    done
    exec "$@""#;

/// Free space on the disk of the images, in percent, below which kubelet frees space.
const WANTED: u64 = 45;

/// A kubelet with its log.
pub(super) struct Kubelet {
    pub(super) process: Service,
    log: PathBuf,
}

impl Kubelet {
    /// Starts kubelet for the engine at a socket. It reads pods from `manifests`, and evicts pods as `eviction` says.
    /// `enter` begins a command that runs programs beside the engine.
    pub(super) fn start(
        mut enter: Command,
        place: &Place,
        program: &Path,
        engine: &Path,
        manifests: &Path,
        eviction: &Value,
    ) -> Self {
        let folder = place.path("kubelet");
        fs::create_dir(&folder).unwrap();
        let (config, log) = (folder.join("config.json"), folder.join("messages"));
        let settings = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "staticPodPath": manifests,
            "containerRuntimeEndpoint": format!("unix://{}", engine.display()),
            "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
            // kubelet listens at no port.
            "enableServer": false,
            "healthzPort": 0,
            "podLogsDir": folder.join("pods"),
            "volumePluginDir": folder.join("plugins"),
            // kubelet makes no cgroups, because hosts have different versions.
            "cgroupsPerQOS": false,
            "enforceNodeAllocatable": [],
            "failSwapOn": false,
            "failCgroupV1": false,
            "makeIPTablesUtilChains": false,
            "oomScoreAdj": 0,
            "fileCheckFrequency": "1s",
            "syncFrequency": "5s",
            "evictionHard": eviction,
            "evictionPressureTransitionPeriod": "1s",
            "imageMinimumGCAge": "1ns",
            // kubelet removes images only under disk pressure.
            "imageGCHighThresholdPercent": 100,
        });
        write(&config, &settings);
        let command = enter.args([
            "unshare",
            "--mount",
            "--propagation",
            "slave",
            "sh",
            "-euc",
            ISOLATED,
            "sh",
        ]);
        command.arg(&folder).arg(program).arg("--config").arg(&config);
        command.arg("--root-dir").arg(folder.join("root"));
        command.arg("--cert-dir").arg(folder.join("certificates"));
        // With an address, kubelet does not look up the machine's.
        command.args(["--hostname-override", "127.0.0.1"]);
        command.args(["--v", "3", "--vmodule", "image_gc_manager=5"]);
        let messages = fs::File::create(&log).unwrap();
        let process = command.stdout(Stdio::null()).stderr(messages).spawn().unwrap();
        Self { process: Service(process), log }
    }

    /// Waits until kubelet has logged one of these texts. Returns the whole log.
    pub(super) fn logs(&mut self, texts: &[&str]) -> String {
        let mut messages = String::new();
        wait_for(&format!("kubelet logs {texts:?}"), || {
            messages = fs::read_to_string(&self.log).unwrap();
            let ended = self.process.0.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}\n{}", last(&messages, ""));
            texts.iter().any(|it| messages.contains(it))
        });
        messages
    }
}

/// Returns the last 30 lines that contain a text.
fn last(messages: &str, text: &str) -> String {
    let lines: Vec<_> = messages.lines().filter(|it| it.contains(text)).collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// Returns the available bytes and the size of the store's disk.
fn disk(place: &Place) -> (u64, u64) {
    let found = rustix::fs::statvfs(place.path("store")).unwrap();
    (found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
}

fn is_enough(place: &Place) -> bool {
    let (available, all) = disk(place);
    available > all * WANTED / 100
}

/// Returns the id of the only running container.
fn running(client: &Client) -> Option<String> {
    let found = client.json(&["ps"]);
    let [container] = &found["containers"].as_array()?[..] else { return None };
    Some(container["id"].as_str()?.to_owned())
}

/// Returns the id of an image.
fn image_id(client: &Client, name: &str) -> Option<String> {
    let found = client.json(&["images"]);
    let is_it = |it: &&Value| it["repoTags"][0] == name;
    let image = found["images"].as_array()?.iter().find(is_it)?;
    Some(image["id"].as_str()?.to_owned())
}

/// Kubelet measures the disk as soon as the images are removed. If too little space is available at that time, it
/// evicts pods.
#[test]
fn kubelet_frees_the_disk_by_removing_an_image_and_evicts_no_pod() {
    if !testing::long_tests() {
        return;
    }
    let Some(program) = testing::built("kubelet-", "kubelet", "kubelet") else { return };
    let Some(containerd) = testing::built(NEWEST, "containerd", "containerd") else { return };
    let Some(crictl) = testing::built("crictl-", "crictl", "crictl") else { return };
    let Some(EnginePlace(place)) = &engine_place() else { return };
    if !has(&["mkfs.ext4", "unshare"]) {
        return;
    }
    // From this file, kubelet reads which processes the kernel killed because it was out of memory.
    if !Path::new("/dev/kmsg").exists() {
        return testing::skipped("kubelet needs /dev/kmsg");
    }
    let [maker, other] = [Place::new(), Place::new()];
    let Some(registry) = Daemon::start(maker.folder.path(), "").unwrap() else {
        return testing::skipped("docker-registry is not installed");
    };
    let tree = maker.tree("tree", "long ");
    add_programs(&tree, &["/bin/dd"]);
    archive_of(&maker, &tree);
    pause_image(&maker);
    let tree = other.tree("tree", "short ");
    fs::write(tree.join("large"), testing::noise(64 << 20)).unwrap();
    archive_of(&other, &tree);
    let [image, pause, unused] =
        ["image", "pause", "unused"].map(|it| format!("{}/{it}:1", registry.host));
    maker.out(&format!("push image:1 {image}"));
    maker.out(&format!("push pause:1 {pause}"));
    other.out(&format!("push image:1 {unused}"));

    let (_, _unmount) = plain_ext4(place, "store", 256 << 20, &["-m", "0"]);
    let socket = place.path("snapshotter");
    let settings = place.path("serve.toml");
    fs::write(&settings, format!("[snapshotter]\ngc-above = {}\n", 90 - WANTED)).unwrap();
    let mut service = snapshotter(place, &socket, &["--config", settings.to_str().unwrap()]);
    let engine = start(place, &containerd, &socket, &registry.host, &pause);
    let client = Client::new(crictl, &engine);
    client.out(&["pull", &unused]);
    let unused_id = image_id(&client, &unused).unwrap();
    let manifests = place.path("manifests");
    fs::create_dir(&manifests).unwrap();
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": format!("quire-test-{}", std::process::id()), "namespace": "default"},
        "spec": {
            // Use the host's network, so that no network plugin is needed.
            "hostNetwork": true,
            "containers": [{"name": "one", "image": image, "command": ["/bin/sleep", "1000"]}],
        }
    });
    write(&manifests.join("pod.json"), &pod);
    let eviction = json!({"imagefs.available": format!("{WANTED}%")});
    let mut kubelet =
        Kubelet::start(Command::new("env"), place, &program, &engine.socket, &manifests, &eviction);
    // kubelet removes an image only if it has seen the image before.
    kubelet.logs(&[&format!("Image ID is new\" imageID=\"{unused_id}\"")]);
    let mut container = None;
    wait_for("the pod runs", || {
        kubelet.logs(&[""]);
        container = running(&client);
        container.is_some()
    });
    let container = container.unwrap();

    let (available, all) = disk(place);
    assert!(is_enough(place), "{available} of {all}");
    let megabytes = (available - all * (WANTED - 10) / 100) >> 20;
    let count = format!("count={megabytes}");
    client.out(&["exec", &container, "/bin/dd", "if=/dev/zero", "of=/new", "bs=1M", &count]);
    assert!(!is_enough(place), "{:?}", disk(place));

    let reclaimed = "able to reduce resource pressure without evicting pods";
    let messages = kubelet.logs(&[reclaimed, "must evict pod(s)"]);
    let seen = last(&messages, "eviction_manager.go");
    assert!(messages.contains(reclaimed) && !messages.contains("must evict"), "{seen}");
    wait_for("the node is under no pressure", || {
        let messages = kubelet.logs(&[""]);
        let after = messages.split_once(reclaimed).map(|it| it.1);
        after.is_some_and(|it| it.contains("no resources are starved"))
    });
    assert!(is_enough(place), "{:?}", disk(place));
    assert_eq!(image_id(&client, &unused), None);
    assert_eq!(running(&client), Some(container));

    kubelet.process.end();
    let pods = client.json(&["pods"]);
    client.end_pod(pods["items"][0]["id"].as_str().unwrap());
    for image in [&image, &pause] {
        client.out(&["rmi", image]);
    }
    let none =
        || engine.out("--namespace k8s.io snapshot --snapshotter quire ls").lines().count() == 1;
    wait_for("no snapshot is left", none);
    assert!(service.end().success());
    assert!(place.out("fsck").starts_with("sound"));
}
