//! `serve --snapshotter`, used by engines: containerd's own tests of snapshotters, and containerd itself.

mod compare;
#[cfg(feature = "registry")]
mod cri;
#[cfg(feature = "registry")]
mod daemon_set;
#[cfg(feature = "registry")]
mod kubelet;
#[cfg(feature = "registry")]
mod lazy;
mod manifests;
mod operators;
mod podman;
mod prometheus;
mod trees;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
#[cfg(feature = "registry")]
use testing::daemon::Daemon;
use testing::fake::wait_for;

use crate::{Place, Ran, add_programs, is_root};

/// The newest containerd, as `cargo xtask inputs containerd` builds it.
pub(crate) const NEWEST: &str = "containerd-2.4";

/// A process that is killed when its test ends.
pub(crate) struct Service(pub(crate) Child);

impl Service {
    pub(crate) fn end(&mut self) -> std::process::ExitStatus {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        self.0.wait().unwrap()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // The process may have ended already.
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ended = self.0.kill();
            let _status = self.0.wait();
        }
    }
}

/// A place whose mounts are unmounted on drop.
pub(crate) struct EnginePlace(pub(crate) Place);

impl Drop for EnginePlace {
    fn drop(&mut self) {
        let here = self.0.folder.path().canonicalize().unwrap();
        for mount in kernel::mount::mounted().unwrap().into_iter().rev() {
            if mount.point.starts_with(&here) {
                // If a mount was on top of another mount, it may have been unmounted with that mount.
                let _gone = kernel::mount::unmount(&mount.point, kernel::mount::Unmount::Lazy);
            }
        }
    }
}

/// A place for an engine that runs containers; `None`, with a note, if this machine cannot run one.
pub(crate) fn engine_place() -> Option<EnginePlace> {
    if !is_root() || testing::program("runc").is_none() {
        return None;
    }
    let place = EnginePlace(Place::new());
    place.0.is_on_disk().then_some(place)
}

/// Starts the snapshotter and waits until it is ready.
pub(crate) fn snapshotter(place: &Place, socket: &Path, options: &[&str]) -> Service {
    let mut command = place.command(&["serve", "--snapshotter", "--socket"]);
    command.arg(socket).arg("--engine").arg(place.path("engine/socket")).args(options);
    let mut service = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(service.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("snapshots of containerd"), "{line}");
    Service(service)
}

#[test]
fn the_tests_of_containerd_pass() {
    let Some(suite) = testing::built("snapshotter-suite-", "suite", "suite") else { return };
    if !is_root() {
        return;
    }
    let place = EnginePlace(Place::new());
    if !place.0.is_on_disk() {
        return;
    }
    let mut command = Command::new(suite);
    command.args(["-test.v", "-test.timeout=5m", "-test.parallel=2"]);
    command.env("QUIRE", env!("CARGO_BIN_EXE_quire")).env("TMPDIR", place.0.folder.path());
    let ran = Ran::from_output(&command.output().unwrap());
    let passed = ran.out.matches("    --- PASS: TestSuite/").count();
    assert_eq!(ran.code, Some(0), "{passed} passed\n{}\n{}", ran.out, ran.err);
    assert!(passed >= 21 && !ran.out.contains("--- SKIP"), "{passed} passed\n{}", ran.out);
}

/// A version of containerd.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Engine {
    /// Version 1.6, which unpacks layers itself.
    Debians,
    Newest,
    /// The newest version, which passes layers to the differ of the service.
    NewestWithDiffer,
    /// As above, but only pods of the runtime class `quire` use the service.
    NewestForClass,
    /// Another version that also passes layers to the differ.
    Version(&'static str),
}

impl Engine {
    const fn version(self) -> &'static str {
        match self {
            Self::Debians => "1.6",
            Self::Newest | Self::NewestWithDiffer | Self::NewestForClass => "2.4",
            Self::Version(version) => version,
        }
    }

    /// Returns a name that differs from the names of other tests' engines.
    fn name(self) -> String {
        let way = if matches!(self, Self::Newest) { "-walking" } else { "" };
        format!("{}{way}", self.version())
    }
}

/// A containerd with a separate folder, and its client.
pub(crate) struct Containerd {
    daemon: Service,
    ctr: PathBuf,
    pub(crate) socket: PathBuf,
}

impl Containerd {
    pub(crate) fn start(
        place: &Place,
        engine: Engine,
        programs: &Path,
        snapshotter: &Path,
    ) -> Self {
        let without = "disabled_plugins = [\"io.containerd.grpc.v1.cri\"]";
        Self::start_with(place, engine, programs, snapshotter, without, "")
    }

    /// Like `start`, with more settings: some outside of tables, and tables.
    pub(crate) fn start_with(
        place: &Place,
        engine: Engine,
        programs: &Path,
        snapshotter: &Path,
        settings: &str,
        tables: &str,
    ) -> Self {
        let command = Command::new(programs.join("containerd"));
        Self::start_by(command, place, engine, programs, snapshotter, settings, tables)
    }

    /// Like `start_with`, by a command that starts the program, and gets more arguments.
    pub(crate) fn start_by(
        mut command: Command,
        place: &Place,
        engine: Engine,
        programs: &Path,
        snapshotter: &Path,
        settings: &str,
        tables: &str,
    ) -> Self {
        let folder = place.path("engine");
        fs::create_dir_all(&folder).unwrap();
        let socket = folder.join("socket");
        // The test uses the configuration that the service prints, with other paths.
        let arguments = ["serve", "--snapshotter", "--print-config", "containerd", "--version"];
        let mut print = place.command(&arguments);
        print.arg(engine.version()).arg("--socket").arg(snapshotter);
        if matches!(engine, Engine::NewestForClass) {
            print.args(["--runtime-class", "quire"]);
        }
        let printed = Ran::from_output(&print.output().unwrap());
        assert_eq!(printed.code, Some(0), "{}", printed.err);
        let (first, rest) = printed.out.split_once('\n').unwrap();
        let rest = match engine {
            Engine::Newest => rest.replace("differ = \"quire-diff\"", "differ = \"walking\""),
            Engine::Debians
            | Engine::NewestWithDiffer
            | Engine::NewestForClass
            | Engine::Version(_) => rest.to_owned(),
        };
        let config = format!(
            "{first}\nroot = {:?}\nstate = {:?}\n{settings}\n[grpc]\naddress = {socket:?}\n{rest}\n{tables}",
            folder.join("root"),
            folder.join("state")
        );
        fs::write(folder.join("config.toml"), config).unwrap();
        // containerd finds its shim in its own folder, and the runtime on the path.
        let path = std::env::var("PATH").unwrap();
        let path = format!("{}:{path}:/usr/sbin", programs.display());
        let log = fs::File::create(folder.join("log")).unwrap();
        command.arg("--config").arg(folder.join("config.toml")).env("PATH", path);
        let daemon = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let it = Self { daemon: Service(daemon), ctr: programs.join("ctr"), socket };
        wait_for("containerd answers", || it.ctr("version").code == Some(0));
        it
    }

    /// Returns the id of the process.
    pub(crate) fn pid(&self) -> u32 {
        self.daemon.0.id()
    }

    fn output(&self, line: &str) -> Output {
        let mut command = Command::new(&self.ctr);
        command.arg("--address").arg(&self.socket).args(line.split(' '));
        command.output().unwrap()
    }

    pub(crate) fn ctr(&self, line: &str) -> Ran {
        Ran::from_output(&self.output(line))
    }

    pub(crate) fn out(&self, line: &str) -> String {
        let ran = self.ctr(line);
        assert_eq!(ran.code, Some(0), "ctr {line}: {}{}", ran.out, ran.err);
        ran.out
    }

    /// Returns the text of a file inside a running container. When the program ends, `ctr` closes its streams, even if
    /// it has not opened them yet, so an empty output is retried. Source: containerd `client/process.go`, `Delete`.
    pub(crate) fn read_in(&self, container: &str, path: &str) -> String {
        let read = |at| self.out(&format!("task exec --exec-id r{at} {container} /bin/cat {path}"));
        (0..50).map(read).find(|it| !it.is_empty()).unwrap_or_default()
    }
}

/// Makes an image of two layers in a tar that engines can import.
pub(crate) fn archive(place: &Place) -> PathBuf {
    let tree = place.tree("tree", "long ");
    archive_of(place, &tree)
}

/// Like [`archive`], with the files of this tree.
pub(crate) fn archive_of(place: &Place, tree: &Path) -> PathBuf {
    add_programs(tree, &["/bin/cat", "/bin/sh", "/bin/sleep"]);
    place.out(&format!("import dir:{} tree", tree.display()));
    place.out("export tree tar:base.tar");
    place.out("import tar:base.tar base");
    let change = ["run", "-d", "--name", "changed", "base", "/bin/sh", "-c"];
    let ran = place.run_each(&[&change[..], &["echo changed > /etc/short"]].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    place.out("wait changed");
    place.out("commit changed image:1");
    place.out("export image:1 docker-archive:image.tar");
    place.path("image.tar")
}

pub(crate) fn runs_containers(engine: Engine, programs: &Path) {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let maker = Place::new();
    let image = archive(&maker);
    let socket = place.path("snapshotter");
    // All containerds keep the runtime's state in the same folder, so the name must be unique.
    let two = format!("quire-test-{}-{}", std::process::id(), engine.name());
    let mut service = snapshotter(place, &socket, &[]);
    let is_differ = matches!(engine, Engine::NewestWithDiffer | Engine::Version(_));
    let engine = Containerd::start(place, engine, programs, &socket);
    let import = format!("image import --snapshotter quire {}", image.display());
    engine.out(&import);
    if is_differ {
        // The layers equal the layers of an import, byte for byte.
        let names = |place: &Place| {
            let all = fs::read_dir(place.path("store/layers")).unwrap();
            all.map(|it| it.unwrap().file_name()).collect::<BTreeSet<_>>()
        };
        // The first root adds an empty layer.
        let nothing = store::Digest::sha256(&[0; 1024]).to_string().replace(':', "-");
        let mut found = names(place);
        assert!(found.remove(OsStr::new(&nothing)), "{found:?}");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found.is_subset(&names(&maker)), "{found:?}");
    }
    let listed = engine.out("image ls -q");
    let name = listed.lines().next().unwrap();
    let run = format!("run --rm --snapshotter quire {name} {two} /bin/cat /etc/short");
    assert_eq!(engine.out(&run), "changed\n");
    // A running container continues without the service, and the next service finds it.
    let run = format!("run --detach --snapshotter quire {name} {two} /bin/sleep 600");
    engine.out(&run);
    assert!(service.end().success());
    assert_eq!(engine.read_in(&two, "/etc/short"), "changed\n");
    let mut service = snapshotter(place, &socket, &[]);
    let write = ["task", "exec", "--exec-id", "b", &two, "/bin/sh", "-c", "echo new > /etc/new"];
    let mut command = Command::new(&engine.ctr);
    let written = command.arg("--address").arg(&engine.socket).args(write).status().unwrap();
    assert!(written.success());
    engine.out(&format!("task kill --signal SIGKILL {two}"));
    let gone = || engine.ctr(&format!("task delete {two}")).code == Some(0);
    wait_for("the container has ended", gone);
    // A stopped container starts again with its changes. If the service was not running, the engine retries only after
    // some seconds.
    wait_for("it starts", || engine.ctr(&format!("task start --detach {two}")).code == Some(0));
    assert_eq!(engine.read_in(&two, "/etc/new"), "new\n");
    engine.out(&format!("task kill --signal SIGKILL {two}"));
    wait_for("the container has ended", gone);
    engine.out(&format!("container delete {two}"));
    engine.out(&format!("image rm --sync {name}"));
    let none = || engine.out("snapshot --snapshotter quire ls").lines().count() == 1;
    wait_for("no snapshot is left", none);
    assert!(service.end().success());
    let here = place.folder.path().canonicalize().unwrap();
    let left = kernel::mount::mounted().unwrap().into_iter();
    let left: Vec<_> = left.filter(|it| it.point.starts_with(here.join("store"))).collect();
    assert_eq!(left, []);
    place.out("gc");
    assert_eq!(fs::read_dir(place.path("store/layers")).unwrap().count(), 0);
}

#[test]
fn debians_containerd_runs_containers() {
    let Some(containerd) = testing::package("containerd") else { return };
    runs_containers(Engine::Debians, containerd.parent().unwrap());
}

#[test]
fn the_newest_containerd_runs_containers() {
    let Some(containerd) = testing::built(NEWEST, "containerd", "containerd") else { return };
    runs_containers(Engine::Newest, containerd.parent().unwrap());
}

#[test]
fn layers_go_into_the_store_without_being_unpacked() {
    let Some(containerd) = testing::built(NEWEST, "containerd", "containerd") else { return };
    runs_containers(Engine::NewestWithDiffer, containerd.parent().unwrap());
}

/// Starts the service, and the newest containerd that passes layers to it.
fn newest(place: &Place) -> Option<(Service, Containerd)> {
    let containerd = testing::built(NEWEST, "containerd", "containerd")?;
    let socket = place.path("snapshotter");
    let service = snapshotter(place, &socket, &[]);
    let programs = containerd.parent().unwrap();
    Some((service, Containerd::start(place, Engine::NewestWithDiffer, programs, &socket)))
}

/// A tool that replaces the policy may remove it first.
#[test]
fn nothing_is_used_while_the_policy_is_not_there() {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let Some(containerd) = testing::built(NEWEST, "containerd", "containerd") else { return };
    let (socket, policy) = (place.path("snapshotter"), place.path("policy.toml"));
    fs::write(&policy, "default = \"any\"\n").unwrap();
    let mut service = snapshotter(place, &socket, &["--policy", policy.to_str().unwrap()]);
    let programs = containerd.parent().unwrap();
    let engine = Containerd::start(place, Engine::NewestWithDiffer, programs, &socket);
    let maker = Place::new();
    let image = archive(&maker);
    engine.out(&format!("image import --snapshotter quire {}", image.display()));
    let name = engine.out("image ls -q");
    let name = name.lines().next().unwrap();
    let container = format!("quire-test-{}-policy", std::process::id());
    let run = format!("run --rm --snapshotter quire {name} {container} /bin/cat /etc/short");
    assert_eq!(engine.out(&run), "changed\n");
    fs::remove_file(&policy).unwrap();
    let ran = engine.ctr(&run);
    assert_ne!(ran.code, Some(0));
    assert!(ran.err.contains("there is no policy"), "{}", ran.err);
    fs::write(&policy, "default = \"any\"\n").unwrap();
    assert_eq!(engine.out(&run), "changed\n");
    assert!(service.end().success());
}

/// Inside, the files of the image belong to the container's root. On the host, they belong to another user.
#[test]
fn a_container_has_a_user_namespace() {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let Some((mut service, engine)) = newest(place) else { return };
    let maker = Place::new();
    let image = archive(&maker);
    engine.out(&format!("image import --snapshotter quire {}", image.display()));
    let listed = engine.out("image ls -q");
    let name = listed.lines().next().unwrap();
    let container = format!("quire-test-{}-userns", std::process::id());
    let script =
        "cat /proc/self/uid_map; [ -O /etc/short ] && cat /etc/short; echo new > /new; sleep 600";
    let mut command = Command::new(&engine.ctr);
    command.arg("--address").arg(&engine.socket).args([
        "run",
        "--detach",
        "--snapshotter",
        "quire",
    ]);
    command.args(["--uidmap", "0:100000:65536", "--gidmap", "0:200000:65536", "--remap-labels"]);
    let out = place.path("out");
    command.arg("--log-uri").arg(format!("file://{}", out.display()));
    let ran = Ran::from_output(
        &command.args([name, &container, "/bin/sh", "-c", script]).output().unwrap(),
    );
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let said = || fs::read_to_string(&out).unwrap_or_default();
    wait_for("the container has written", || said().ends_with("changed\n"));
    let words: Vec<_> = said().split_whitespace().map(str::to_owned).collect();
    assert_eq!(words, ["0", "100000", "65536", "changed"]);
    let roots = kernel::mount::mounted().unwrap().into_iter().map(|it| it.point);
    let here = place.path("store/snapshots").canonicalize().unwrap();
    let mut roots = roots.filter(|it| it.starts_with(&here) && it.ends_with("root"));
    let root = roots.next().unwrap();
    wait_for("the container has written", || root.join("new").exists());
    let owner = |path: &str| {
        let found = fs::metadata(root.join(path)).unwrap();
        (found.uid(), found.gid())
    };
    assert_eq!([owner("new"), owner("etc/short")], [(100_000, 200_000); 2]);
    engine.out(&format!("task kill --signal SIGKILL {container}"));
    let gone = || engine.ctr(&format!("task delete {container}")).code == Some(0);
    wait_for("the container has ended", gone);
    engine.out(&format!("container delete {container}"));
    assert!(service.end().success());
}

#[cfg(feature = "registry")]
#[test]
fn what_the_store_has_is_not_downloaded() {
    let Some(containerd) = testing::built(NEWEST, "containerd", "containerd") else { return };
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let maker = Place::new();
    let Some(registry) = Daemon::start(maker.folder.path(), "").unwrap() else {
        return testing::skipped("docker-registry is not installed");
    };
    archive(&maker);
    let name = format!("{}/image:1", registry.host);
    maker.out(&format!("push image:1 {name}"));
    place.out(&format!("pull {name}"));
    let socket = place.path("snapshotter");
    let mut service = snapshotter(place, &socket, &["--skip", "download"]);
    let programs = containerd.parent().unwrap();
    let engine = Containerd::start(place, Engine::NewestWithDiffer, programs, &socket);
    engine.out(&format!("image pull --plain-http --snapshotter quire {name}"));
    // The content store has a manifest and a config.
    assert_eq!(engine.out("content ls -q").lines().count(), 2);
    let container = format!("quire-test-{}-skip", std::process::id());
    let run = format!("run --rm --snapshotter quire {name} {container} /bin/cat /etc/short");
    assert_eq!(engine.out(&run), "changed\n");
    // The engine uses the layers and the image of the pull, so the service wrote no data.
    let used = engine.out("snapshot --snapshotter quire usage -b");
    let used: Vec<_> = used.lines().skip(1).map(|it| it.split_whitespace().nth(1)).collect();
    assert_eq!(used, [Some("0"); 2]);
    let left = |name: &str| fs::read_dir(place.path("store").join(name)).unwrap().count();
    assert_eq!((left("layers"), left("images")), (2, 1));
    assert!(service.end().success());
}

/// If the service is killed at any time, the next one can unpack each image, and the image runs.
#[test]
fn a_killed_service_leaves_nothing_half_done() {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let Some((mut service, engine)) = newest(place) else { return };
    let maker = Place::new();
    let image = archive(&maker);
    let socket = place.path("snapshotter");
    let import = format!("image import --snapshotter quire {}", image.display());
    for round in 0..10 {
        std::thread::scope(|scope| {
            // The import fails, or has already ended.
            let importing = scope.spawn(|| engine.ctr(&import));
            std::thread::sleep(Duration::from_millis(round * 30));
            service.0.kill().unwrap();
            service.0.wait().unwrap();
            importing.join().unwrap();
        });
        service = snapshotter(place, &socket, &[]);
        // The engine retries after some seconds.
        wait_for("it is unpacked", || engine.ctr(&import).code == Some(0));
        let name = engine.out("image ls -q");
        let name = name.lines().next().unwrap();
        let container = format!("quire-test-{}-killed", std::process::id());
        let run = format!("run --rm --snapshotter quire {name} {container} /bin/cat /etc/short");
        assert_eq!(engine.out(&run), "changed\n");
        engine.out(&format!("image rm --sync {name}"));
        assert!(place.out("fsck").starts_with("sound"));
    }
    let none = || engine.out("snapshot --snapshotter quire ls").lines().count() == 1;
    wait_for("no snapshot is left", none);
    assert!(service.end().success());
    place.out("gc");
    for folder in ["layers", "images", "snapshots/containerd", "tmp"] {
        let left = fs::read_dir(place.path("store").join(folder)).unwrap().count();
        assert_eq!(left, 0, "{folder}");
    }
}
