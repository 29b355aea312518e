//! Interfaces for operators: settings, logs, metrics, `ps --engine`, `doctor`, and updates.

use std::os::fd::AsFd as _;

use kernel::mount::{Reach, bind};
use serde_json::Value;

use super::*;

/// An engine with a running container, its service and its image.
struct Host {
    engine: Containerd,
    service: Service,
    image: String,
    container: String,
    socket: PathBuf,
}

impl Host {
    /// `start` starts the service.
    fn new(
        place: &Place,
        name: &str,
        start: impl FnOnce(&Place, &Path) -> Service,
    ) -> Option<Self> {
        let containerd = testing::built(NEWEST, "containerd", "containerd")?;
        let maker = Place::new();
        let image = archive(&maker);
        let socket = place.path("snapshotter");
        let service = start(place, &socket);
        let programs = containerd.parent().unwrap();
        let engine = Containerd::start(place, Engine::NewestWithDiffer, programs, &socket);
        engine.out(&format!("image import --snapshotter quire {}", image.display()));
        let listed = engine.out("image ls -q");
        let image = listed.lines().next().unwrap().to_owned();
        let container = format!("quire-test-{}-{name}", std::process::id());
        let run = format!("run --detach --snapshotter quire {image} {container} /bin/sleep 600");
        engine.out(&run);
        Some(Self { engine, service, image, container, socket })
    }

    fn reads(&self) {
        assert_eq!(self.engine.read_in(&self.container, "/etc/short"), "changed\n");
    }

    /// Kills the container, and removes it.
    fn remove_container(&self) {
        let container = &self.container;
        self.engine.out(&format!("task kill --signal SIGKILL {container}"));
        let gone = || self.engine.ctr(&format!("task delete {container}")).code == Some(0);
        wait_for("the container has ended", gone);
        self.engine.out(&format!("container delete {container}"));
    }
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Starts a service with the program at a path, with settings from a file, and its log in another file.
fn service_of(place: &Place, program: &Path, socket: &Path) -> Service {
    let settings =
        format!("[snapshotter]\nsocket = {socket:?}\nengine = {:?}\n", place.path("engine/socket"));
    fs::write(place.path("serve.toml"), settings).unwrap();
    let log = fs::File::options().append(true).create(true).open(place.path("log")).unwrap();
    let mut command = Command::new(program);
    command.arg("--store").arg(place.path("store"));
    command.args(["serve", "--snapshotter", "--config"]).arg(place.path("serve.toml"));
    // The umask of a service manager does not change the files that containers see.
    command.env_remove("QUIRE_LOG").env_remove("QUIRE_POLICY").stdin(Stdio::null());
    let mut service = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(service.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("snapshots of containerd"), "{line}");
    Service(service)
}

fn quire() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_quire"))
}

#[test]
fn mistakes_with_services_are_told() {
    let place = Place::new();
    let own = "[snapshotter]\nsocket = \"/s\"\nimage-service = \"/s\"\n";
    fs::write(place.path("serve.toml"), own).unwrap();
    for (line, text) in [
        ("serve", "<--lazy|--snapshotter|--mounts|--storage|--registry>"),
        ("serve --print-config containerd", "<--lazy|--snapshotter|--mounts|--storage|--registry>"),
        ("serve --lazy --snapshotter", "cannot be used with '--snapshotter'"),
        (
            "serve --snapshotter --config serve.toml",
            "serve.toml: image-service = \"/s\" is the service's own",
        ),
        ("doctor --root nowhere", "cannot examine --root nowhere: No such file"),
        ("doctor --root serve.toml", "--root serve.toml is not a directory"),
        ("mount --specification --lazy x", "--specification cannot be used with --lazy"),
    ] {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.err);
        assert!(ran.err.contains(text), "{line}: {}", ran.err);
    }
    for words in ["--snapshotter", "containerd, and Docker and Kubernetes"] {
        assert!(place.out("help serve").contains(words), "{words}");
    }
}

#[test]
fn an_operator_sees_what_an_engine_does() {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let start = |place: &Place, socket: &Path| service_of(place, quire(), socket);
    let Some(mut host) = Host::new(place, "seen", start) else { return };
    let store = place.path("store");

    let found = json(&place.out("ps --engine --json"));
    let [root] = &found.as_array().unwrap()[..] else { panic!("{found}") };
    assert_eq!((&root["instance"], &root["kind"]), (&"containerd".into(), &"active".into()));
    let snapshot = root["snapshot"].as_str().unwrap();
    assert!(snapshot.ends_with(&host.container), "{snapshot}");
    let point = root["mountPoint"].as_str().unwrap();
    assert!(Path::new(point).starts_with(&store), "{point}");
    let uses = root["uses"].as_array().unwrap();
    let is_its = |it: &Value| it.as_str().unwrap().ends_with(&format!("{}/rootfs", host.container));
    assert!(uses.iter().any(is_its), "{uses:?}");
    assert!(place.out("ps --engine").contains(snapshot));
    // There are two layers below the container's.
    let all = json(&place.out("ps --engine --all --json"));
    let committed = all.as_array().unwrap().iter().filter(|it| it["kind"] == "committed");
    assert_eq!(committed.count(), 2);

    let socket = host.socket.display().to_string();
    let metrics = |socket: &str| place.out(&format!("ps --engine --metrics --socket {socket}"));
    let seen = metrics(&socket);
    let was_asked =
        |it: &&str| it.starts_with("quire_snapshotter_calls_total") && it.contains("\"Stat\"");
    assert!(seen.lines().any(|it| was_asked(&it)), "{seen}");
    for line in [
        "quire_snapshotter_up 1",
        "quire_snapshotter_mounted_roots{instance=\"containerd\",kind=\"active\"} 1",
        "quire_snapshotter_read_layers_total{instance=\"containerd\"} 2",
        "quire_snapshotter_calls_total{instance=\"containerd\",call=\"Apply\",code=\"OK\"} 2",
        "quire_snapshotter_calls_total{instance=\"containerd\",call=\"Prepare\",code=\"OK\"} 3",
        "quire_snapshotter_call_seconds_count{instance=\"containerd\",call=\"Apply\"} 2",
    ] {
        assert!(seen.lines().any(|it| it == line), "{line}\n{seen}");
    }

    // An engine's names may contain any characters.
    let prepare = ["snapshot", "--snapshotter", "quire", "prepare", "a\u{1b}[2Jb\nc\u{202e}d"];
    let mut command = Command::new(&host.engine.ctr);
    let _refused = command.arg("--address").arg(&host.engine.socket).args(prepare).output();
    let log = fs::read_to_string(place.path("log")).unwrap();
    for call in ["prepare", "apply", "commit"] {
        assert!(log.lines().any(|it| it.contains(&format!("call=\"{call}\""))), "{call}\n{log}");
    }
    // Kubernetes makes these calls all the time, so they are logged only if they take long.
    for call in ["list", "mounts", "stat", "usage"] {
        let is_quick = |it: &&str| {
            let took = it.split_once(" took=").and_then(|it| it.1.split(' ').next());
            let of_call = it.contains(&format!(" call=\"{call}\""));
            of_call && took.is_some_and(|it| it.ends_with("ms") || it.ends_with("µs"))
        };
        let quick: Vec<_> = log.lines().filter(is_quick).collect();
        assert!(quick.is_empty(), "{quick:?}");
    }
    for line in log.lines() {
        // The time is in RFC 3339 and UTC.
        let (time, _) = line.split_once(' ').unwrap();
        assert!(time.len() > 20 && time.as_bytes()[10] == b'T' && time.ends_with('Z'), "{line}");
    }
    assert!(log.contains("a\\u{1b}[2Jb\\nc\\u{202e}d"), "{log}");
    assert!(!log.contains(|it: char| (it.is_control() && it != '\n') || it == '\u{202e}'), "{log}");

    host.remove_container();
    assert!(host.service.end().success());
    assert!(metrics(&socket).contains("quire_snapshotter_up 0"));
}

#[test]
fn doctor_reads_the_configuration_that_an_engine_has() {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let start = |place: &Place, socket: &Path| service_of(place, quire(), socket);
    let Some(mut host) = Host::new(place, "doctor", start) else { return };
    // A root directory whose paths are links to paths of the test.
    let root = place.path("host");
    let here = root.join(place.folder.path().strip_prefix("/").unwrap());
    fs::create_dir_all(&here).unwrap();
    let folder = fs::File::open(place.folder.path()).unwrap();
    bind(folder.as_fd(), Reach::One).unwrap().attach_at(&here).unwrap();
    for folder in ["etc/containerd", "etc/quire"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    fs::copy(place.path("engine/config.toml"), root.join("etc/containerd/config.toml")).unwrap();
    fs::copy(place.path("serve.toml"), root.join("etc/quire/serve.toml")).unwrap();
    let doctor = || json(&place.out(&format!("doctor --json --root {}", root.display())));
    let found = doctor();
    let engines = found["engines"].as_array().unwrap();
    assert_eq!(engines.len(), 1, "{engines:?}");
    assert_eq!(engines[0]["snapshotter"], "quire");
    assert_eq!(engines[0]["findings"], Value::Array(Vec::new()));
    assert!(found["snapshotter"].as_str().unwrap().contains("socket /"), "{found}");
    assert!(host.service.end().success());
    let found = doctor();
    let findings = found["engines"][0]["findings"].as_array().unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert!(findings[0]["problem"].as_str().unwrap().starts_with("no service listens on "));
    let text = place.out(&format!("doctor --root {}", root.display()));
    assert!(text.contains("systemctl enable --now quire-snapshotter"), "{text}");
    host.service = service_of(place, quire(), &host.socket);
    host.remove_container();
}

/// Simulates the update of a package: the file of a running program is replaced by another file, and the service is
/// restarted. `QUIRE_BEFORE` names the program of the previous version.
#[test]
fn an_update_takes_over_what_is_mounted() {
    let Some(before) = std::env::var_os("QUIRE_BEFORE").map(PathBuf::from) else {
        return testing::skipped("QUIRE_BEFORE names no quire of the version before");
    };
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let program = place.path("quire");
    testing::copy_program(before, &program);
    // The program may be older than the settings file.
    let start = |_: &Place, socket: &Path| {
        let mut command = Command::new(&program);
        command.arg("--store").arg(place.path("store"));
        command.args(["serve", "--snapshotter", "--socket"]).arg(socket);
        command.arg("--engine").arg(place.path("engine/socket")).stdin(Stdio::null());
        let mut service = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(service.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("snapshots of containerd"), "{line}");
        Service(service)
    };
    let Some(mut host) = Host::new(place, "update", start) else { return };
    let write = ["task", "exec", "--exec-id", "w", &host.container, "/bin/sh", "-c"];
    let mut command = Command::new(&host.engine.ctr);
    command.arg("--address").arg(&host.engine.socket).args(write).arg("echo old > /etc/new");
    assert!(command.status().unwrap().success());
    let next = place.path("next");
    testing::copy_program(quire(), &next);
    rename_over(&next, &program);
    assert!(host.service.end().success());
    host.reads();
    host.service = service_of(place, &program, &host.socket);
    host.reads();
    // Snapshots of both versions have the same layers as parents.
    let run = format!(
        "run --rm --snapshotter quire {} {}-2 /bin/cat /etc/short",
        host.image, host.container
    );
    wait_for("the engine reaches the service", || {
        host.engine.ctr("snapshot --snapshotter quire ls").code == Some(0)
    });
    assert_eq!(host.engine.out(&run), "changed\n");
    assert_eq!(host.engine.read_in(&host.container, "/etc/new"), "old\n");
    host.remove_container();
    host.engine.out(&format!("image rm --sync {}", host.image));
    let none = || host.engine.out("snapshot --snapshotter quire ls").lines().count() == 1;
    wait_for("no snapshot is left", none);
    assert!(host.service.end().success());
    assert!(place.out("fsck").starts_with("sound"));
}

fn rename_over(from: &Path, to: &Path) {
    rustix::fs::rename(from, to).unwrap();
}
