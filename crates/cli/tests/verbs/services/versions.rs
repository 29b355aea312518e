//! `serve --snapshotter` with other versions of containerd, and with Docker on top.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::services::engines::{
    Containerd, Engine, EnginePlace, NEWEST, Service, archive, engine_place, runs_containers,
    snapshotter,
};
use crate::{Place, Ran};
use testing::daemon::Daemon;
use testing::fake::wait_for;

#[test]
fn containerd_1_7_runs_containers() {
    let built = testing::built("containerd-1.7.", "containerd", "containerd-1.7");
    let Some(containerd) = built else { return };
    runs_containers(Engine::Version("1.7"), containerd.parent().unwrap());
}

#[test]
fn containerd_2_1_runs_containers() {
    let built = testing::built("containerd-2.1.", "containerd", "containerd-2.1");
    let Some(containerd) = built else { return };
    runs_containers(Engine::Version("2.1"), containerd.parent().unwrap());
}

/// A dockerd with a separate folder, and its client.
struct Docker {
    _daemon: Service,
    client: PathBuf,
    folder: PathBuf,
}

impl Docker {
    /// Starts dockerd without a bridge, because packet rules would change the whole machine.
    fn start(place: &Place, programs: &Path, engine: &Containerd) -> Self {
        let folder = place.path("docker");
        fs::create_dir_all(folder.join("config/cli-plugins")).unwrap();
        symlink(programs.join("buildx"), folder.join("config/cli-plugins/docker-buildx")).unwrap();
        let settings =
            r#"{"features": {"containerd-snapshotter": true}, "storage-driver": "quire"}"#;
        fs::write(folder.join("daemon.json"), settings).unwrap();
        let log = fs::File::create(folder.join("log")).unwrap();
        let mut command = Command::new(programs.join("dockerd"));
        command.arg("--config-file").arg(folder.join("daemon.json"));
        command.arg("--containerd").arg(&engine.socket);
        command.arg("--data-root").arg(folder.join("data"));
        command.arg("--exec-root").arg(folder.join("exec"));
        command.arg("--pidfile").arg(folder.join("pid"));
        command.arg("--host").arg(format!("unix://{}", folder.join("socket").display()));
        command.args(["--bridge=none", "--userland-proxy=false"]);
        command.args(["--iptables=false", "--ip6tables=false"]);
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{path}:/usr/sbin")).env("TMPDIR", &folder);
        let daemon = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let it = Self { _daemon: Service(daemon), client: programs.join("docker"), folder };
        wait_for("dockerd answers", || it.run(&["version"]).code == Some(0));
        it
    }

    fn run(&self, words: &[&str]) -> Ran {
        let mut command = Command::new(&self.client);
        command.env("DOCKER_HOST", format!("unix://{}", self.folder.join("socket").display()));
        command.env("DOCKER_CONFIG", self.folder.join("config")).stdin(Stdio::null());
        Ran::from_output(&command.args(words).output().unwrap())
    }

    fn out(&self, words: &[&str]) -> String {
        let ran = self.run(words);
        let log = || fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        assert_eq!(ran.code, Some(0), "docker {words:?}: {}{}\n{}", ran.out, ran.err, log());
        ran.out
    }
}

#[test]
fn docker_pulls_runs_commits_builds_and_pushes() {
    let Some(containerd) = testing::built(NEWEST, "containerd", "containerd") else { return };
    let Some(dockerd) = testing::built("docker-", "dockerd", "docker") else { return };
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let maker = Place::new();
    let Some(registry) = Daemon::start(maker.folder.path(), "").unwrap() else {
        return testing::skipped("docker-registry is not installed");
    };
    archive(&maker);
    let image = &format!("{}/image:1", registry.host);
    maker.out(&format!("push image:1 {image}"));
    let socket = place.path("snapshotter");
    let mut service = snapshotter(place, &socket, &[]);
    let programs = containerd.parent().unwrap();
    let engine = Containerd::start(place, Engine::NewestWithDiffer, programs, &socket);
    let docker = Docker::start(place, dockerd.parent().unwrap(), &engine);

    docker.out(&["pull", image]);
    let one_shot = ["run", "--rm", "--network", "host"];
    let cat =
        |image: &str, file: &str| docker.out(&[&one_shot[..], &[image, "/bin/cat", file]].concat());
    assert_eq!(cat(image, "/etc/short"), "changed\n");
    let writes = "echo new > /etc/new && echo more >> /etc/short";
    docker.out(&["run", "--name", "one", "--network", "host", image, "/bin/sh", "-c", writes]);
    let mut changes: Vec<_> = docker.out(&["diff", "one"]).lines().map(String::from).collect();
    changes.sort();
    assert_eq!(changes, ["A /etc/new", "C /etc", "C /etc/short"]);

    docker.out(&["commit", "one", "committed:1"]);
    assert_eq!(cat("committed:1", "/etc/new"), "new\n");
    assert_eq!(cat("committed:1", "/etc/short"), "changed\nmore\n");
    // A stopped container starts again with its changes.
    docker.out(&["start", "--attach", "one"]);
    docker.out(&["rm", "one"]);

    let context = place.path("context");
    fs::create_dir(&context).unwrap();
    fs::write(context.join("copied"), "copied\n").unwrap();
    let steps = format!(
        "FROM {image}\nCOPY copied /etc/copied\n\
         RUN [\"/bin/sh\", \"-c\", \"/bin/cat /etc/copied /etc/short > /etc/both\"]\n"
    );
    fs::write(context.join("Dockerfile"), steps).unwrap();
    let context = context.to_str().unwrap();
    docker.out(&["build", "--network", "host", "--tag", "built:1", context]);
    assert_eq!(cat("built:1", "/etc/both"), "copied\nchanged\n");

    // A pushed image is complete: Quire pulls it and finds the same files.
    for name in ["committed:1", "built:1"] {
        let pushed = &format!("{}/{name}", registry.host);
        docker.out(&["tag", name, pushed]);
        docker.out(&["push", pushed]);
        maker.out(&format!("pull {pushed}"));
    }
    let run = ["run", "--rm", "/bin/cat", "/etc/both"];
    let built = format!("{}/built:1", registry.host);
    let ran = maker.run_each(&[run[0], run[1], &built, run[2], run[3]]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "copied\nchanged\n"), "{}", ran.err);

    docker.out(&["builder", "prune", "--all", "--force"]);
    docker.out(&["image", "prune", "--all", "--force"]);
    let none =
        || engine.out("--namespace moby snapshot --snapshotter quire ls").lines().count() == 1;
    wait_for("no snapshot is left", none);
    assert!(place.out("fsck").starts_with("sound"));
    drop(docker);
    assert!(service.end().success());
}
