//! Runs every code block of README.md and the pages below `docs`, and every example of `quire help VERB`.
//!
//! A page is one session of a shell, as root, in mount and PID namespaces with private copies of `/etc`, `/run`, the
//! store and the folders that pages use. The session begins with `make install`. A registry on loopback is the mirror
//! of all registries. Another test, `verbs::documents`, checks that the commands parse.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use testing::daemon::Daemon;
use testing::documents::{Page, pages, repository};

use crate::registry_verbs::registries::start as start_registry;
use crate::{Place, Ran, add_programs, is_root, write};

/// Lines of pages and examples that are not run: the page or `help VERB`, the beginning of the line, and the
/// reason.
const NOT_RUN: [(&str, &str, &str); 87] = [
    ("README.md", "sudo apt install ", "installs a release; the tier `package` does it"),
    ("README.md", "sudo ./install.sh", "installs a release"),
    ("docs/docker-users.md", "buildah ", "buildah; the tests `makers` import its images"),
    ("docs/docker-users.md", "docker build ", "Docker; the tests `engines` do it"),
    (
        "docs/getting-started.md",
        "sudo apt install ",
        "installs a release; the tier `package` does it",
    ),
    ("docs/getting-started.md", "sudo ./install.sh", "installs a release"),
    ("docs/os-images.md", "sudo systemd-sysext ", "changes /usr of the host"),
    ("docs/os-images.md", "hello-sysext ", "as above"),
    ("docs/os-images.md", "quire export --bootable ", "a kernel; the tests `verified_disk` do it"),
    ("README.md", "make demo", "builds Quire, and takes minutes"),
    ("README.md", "make test", "runs this test"),
    ("docs/containers.md", "quire run -d --name step --network host", "downloads from Debian"),
    ("docs/containers.md", "quire wait step", "as above"),
    ("docs/containers.md", "quire commit step", "as above"),
    ("docs/containers.md", "quire export step", "as above"),
    ("docs/containers.md", "sudo systemctl", "systemd; `vm newest systemd` does it"),
    ("docs/containers.md", "unshare --user --map-auto", "a user with subordinate ids: `rootless`"),
    ("docs/containers.md", "quire run --security-opt apparmor=my", "a host with AppArmor"),
    ("docs/containers.md", "cat /proc/PID/", "as above"),
    ("docs/containers.md", "quire run --network container:", "it needs a container that runs"),
    ("docs/containers.md", "quire run --network ns:", "a network namespace that someone has made"),
    ("docs/containers.md", "quire run -d --network shop", "netavark; the tests `named` do it"),
    ("docs/containers.md", "quire run --network shop", "as above"),
    ("docs/docker-users.md", "quire run -d --name server", "as above"),
    ("docs/docker-users.md", "quire run --network two", "as above"),
    ("docs/engines.md", "systemctl ", "systemd; `vm newest systemd` does it"),
    ("docs/operations.md", "mkdir -p /etc/quire", "changes /etc of the host"),
    ("docs/operations.md", "echo 'OPTIONS=", "as above"),
    ("docs/operations.md", "systemctl ", "systemd; no test starts the registry's unit"),
    ("docs/engines.md", "quire serve --snapshotter\n", "a service; the tests `engines` start it"),
    ("docs/engines.md", "mkdir -p /opt/containerd", "changes /opt of the host"),
    ("docs/engines.md", "ln -s /usr/bin/quire-image-verifier ", "as above"),
    ("docs/engines.md", "ctr ", "containerd; the tests `engines` do it"),
    ("docs/engines.md", "cargo xtask deb", "builds Quire; the tier `package` does it"),
    ("docs/engines.md", "apt install ", "as above"),
    (
        "docs/engines/docker.md",
        "quire serve --snapshotter --print-config containerd --version \"$(",
        "containerd",
    ),
    ("docs/engines/nerdctl.md", "nerdctl ", "nerdctl, which no test has"),
    (
        "docs/engines/podman.md",
        "podman run ",
        "podman with an image of Debian; the tests `podman` do it",
    ),
    (
        "docs/images.md",
        "mount -t quire ",
        "mount(8) looks below /usr/sbin; the tests `mount_helper` do it",
    ),
    ("docs/images.md", "systemctl ", "systemd; `vm newest systemd` does it"),
    ("docs/images.md", "storagectl ", "systemd 261; the tests `storage` do it"),
    ("docs/images.md", "mount -t storage ", "as above"),
    (
        "docs/images.md",
        "/usr/libexec/virtiofsd ",
        "a virtual machine; `vm newest virtiofs` does it",
    ),
    ("docs/images.md", "qemu-system-x86_64 ", "as above"),
    ("docs/images.md", "    -chardev ", "as above"),
    ("docs/images.md", "    -object ", "as above"),
    ("docs/images.md", "    -drive ", "as above"),
    ("docs/images.md", "    -append ", "as above"),
    ("docs/images.md", "quire bundle --vm ", "a store on another mount; the tests `machine` do it"),
    ("help bundle", "quire bundle --vm ", "as above"),
    ("docs/images.md", "    xargs cloud-hypervisor ", "KVM, which no test has"),
    ("docs/images.md", "jq ", "jq, which no test has"),
    ("docs/images.md", "    boot_args: ", "as above"),
    ("docs/images.md", "mount -t erofs ", "as above"),
    ("docs/images.md", "mount -t virtiofs ", "as above"),
    (
        "docs/lazy.md",
        "quire pull --form tar --keep-layers --index REF",
        "words in capitals; the tests `lazy`",
    ),
    ("docs/lazy.md", "quire trace ", "as above"),
    ("docs/lazy.md", "quire index --push REF", "as above"),
    ("docs/lazy.md", "systemctl ", "systemd; `vm newest systemd` does it"),
    ("docs/nodes.md", "cargo xtask node-image ", "builds Quire; a test of `xtask` makes an image"),
    ("docs/nodes.md", "ctr ", "containerd; the tests `daemon_set` do it"),
    ("docs/nodes.md", "kubectl ", "Kubernetes; the tests `daemon_set` run the pod"),
    ("docs/nodes.md", "helm ", "Kubernetes; the tests `manifests` render the chart"),
    ("docs/nodes.md", "ulimit -n ", "needs CAP_SYS_RESOURCE, which root may lack in a container"),
    ("docs/nodes.md", "exec quire serve ", "a service; the tests `engines` start it"),
    ("docs/operations.md", "quire serve --registry ", "a service; the tests `peers` start it"),
    ("docs/release.md", "minisign ", "files of a release"),
    ("docs/release.md", "sha256sum ", "as above"),
    ("docs/release.md", "tar ", "as above"),
    ("docs/release.md", "sudo quire-", "as above; the tests of `xtask` run `install.sh`"),
    ("docs/release.md", "cargo xtask release", "builds Quire for minutes; `check-all` does it"),
    ("help attach", "quire attach", "it ends with the container"),
    ("help bundle", "runc run ", "a terminal, and a container that nothing ends"),
    ("help import", "docker export ", "docker"),
    ("help load", "docker save ", "docker"),
    ("help login", "quire login registry.example.com\n", "asks for a password; the tests `logins`"),
    ("help login", "quire login -u robot", "a registry with users; the tests `logins`"),
    ("help logout", "quire logout", "as above"),
    ("help logs", "quire logs --follow", "it ends with the container"),
    ("help exec", "quire exec -it", "a shell that nothing ends"),
    ("help network", "quire run ", "netavark; the tests `named` do it"),
    ("help serve", "quire serve --lazy", "a service; the tests `served`"),
    ("help serve", "quire serve --snapshotter\n", "a service; the tests `engines`"),
    ("help serve", "quire serve --registry ", "a service; the tests `peers`"),
    ("help pull", "quire pull --platform ", "an image for another processor"),
    ("help trace", "quire trace ", "needs the service of lazy images; the tests `lazy`"),
    ("help unseal", "quire unseal --store ./store", "there is no such store"),
];

/// Preconditions of a page: the page or `help VERB`, and the commands that establish them.
const GIVEN: [(&str, &str); 29] = [
    ("help umount", "quire mount debian /mnt"),
    (
        "help rm",
        "quire run -d --name web debian true; quire run -d --name db debian sleep 9; quire wait web",
    ),
    ("docs/containers.md", "quire pull debian; mkdir work; echo NAME=value > app.env"),
    ("help rmi", "quire tag debian app:old"),
    ("help untag", "quire tag debian app; quire tag debian app:old"),
    ("docs/operations.md", "quire pull debian"),
    ("docs/images.md", "quire pull debian; quire export debian oci:./debian; mkdir -p /srv/tree"),
    ("help ", "quire pull debian; mkdir -p /srv/root objects; echo a > /srv/root/a"),
    ("docs/policy.md", "quire pull debian; quire tag debian app"),
    ("help push", KEY_AND_APP),
    ("help sign", KEY_AND_APP),
    ("help bundle", "true"),
    ("help commit", "quire run -d --name web debian sleep 1000"),
    (
        "help cp",
        "quire run -d --name web debian sleep 1000; mkdir site; echo text > site/index.html",
    ),
    (
        "help diff",
        "quire pull debian:12; quire pull debian:13; quire run -d --name web debian sleep 1000",
    ),
    ("help exec", "quire run -d --name web debian sleep 1000"),
    ("help fork", "quire run -d --name agent debian sleep 1000"),
    (
        "help rollback",
        "quire run -d --name web debian sleep 1000; quire snapshot create web before-upgrade",
    ),
    ("help import", "quire export debian oci:./layout:1.0; quire export debian erofs:base.erofs"),
    ("help index", "quire rmi debian; quire pull --form tar --keep-layers debian:latest debian"),
    ("help load", "quire save -o debian.tar debian"),
    ("help port", "quire run -d --name web --publish 8080:80 debian sleep 1000"),
    ("help ls", "quire build dir:/srv/root root.erofs"),
    ("help run", "quire pull nginx; mkdir -p /srv/www; quire tag debian app"),
    (
        "help start",
        "quire run -d --name web debian true; quire wait web; quire create --name batch debian true",
    ),
    ("help show", "quire export debian erofs:debian.erofs"),
    ("help mount", "quire export debian erofs:debian.erofs"),
    ("help wait", "quire run -d --name web debian true"),
    ("help merge", "quire tag debian runtime; quire tag debian application"),
];

/// Makes a key, and the image that is signed or pushed.
const KEY_AND_APP: &str = "quire tag debian app; \
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out cosign.key";

/// Makes the containers and names that most examples use.
const USUAL: &str = "
    for name in app app:old; do quire tag debian $name; done
    for name in web db; do quire run -d --name $name debian sleep 1000; done";

/// Runs before a script: makes the page's private folders, and replaces some programs of the host.
const SANDBOX: &str = r#"
set -eu
base=$1 repository=$2 registry=$3 xtask=$4 quire=$5
cd "$base"
mkdir -p etc.upper etc.work lib.upper lib.work sbin.upper sbin.work mnt srv local store home work
mount -t overlay overlay -o lowerdir=/etc,upperdir=$base/etc.upper,workdir=$base/etc.work /etc
mount -t overlay overlay -o lowerdir=/var/lib,upperdir=$base/lib.upper,workdir=$base/lib.work /var/lib
# `make install` makes links for mount(8) here.
mount -t overlay overlay -o lowerdir=/usr/sbin,upperdir=$base/sbin.upper,workdir=$base/sbin.work /usr/sbin
mkdir -p /var/lib/quire
mount --bind store /var/lib/quire
for folder in mnt srv; do mount --bind $folder /$folder; done
mount --bind local /usr/local
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /etc/quire/certs.d/_default /etc/bash_completion.d
printf '[host."http://%s"]\ncapabilities = ["pull", "resolve", "push"]\n' "$registry" \
    > /etc/quire/certs.d/_default/hosts.toml
# What `make install` builds was built before.
printf '#!/bin/sh\n[ "$1" = xtask ] && shift && exec "%s" "$@" --binary "%s"\n' "$xtask" "$quire" > cargo
chmod 755 cargo
# A clone of the repository is where `make` is called.
printf '#!/bin/sh\nexec /usr/bin/make --no-print-directory -C "%s" "$@"\n' "$repository" > make
chmod 755 make
unset MAKEFLAGS MAKELEVEL MFLAGS DESTDIR CARGO_TARGET_DIR
export HOME=$base/home PATH=$base:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd work
remove_containers() {
    quire ps --all --json > ../ps.json 2> /dev/null || return 0
    set -- $(sed -n 's/.*"container": *"\([^"]*\)".*/\1/p' ../ps.json)
    [ $# = 0 ] || quire rm --force "$@"
}
end() {
    code=$?
    set +ex
    remove_containers > /dev/null 2>&1
    exit $code
}
trap end EXIT
make install > ../install.log
sudo() { "$@"; }
"#;

/// The sandbox, and the registry with the images of the pages.
struct Session {
    // The registry is dropped before the place, because dropping the place checks for leftovers.
    registry: Daemon,
    place: Place,
    xtask: PathBuf,
}

impl Session {
    fn new() -> Option<Self> {
        let programs = ["make", "script", "unshare", "crun", "mkfs.ext4", "pasta"];
        if !is_root() || !testing::programs(&programs) {
            return None;
        }
        let xtask = Path::new(env!("CARGO_BIN_EXE_quire")).with_file_name("xtask");
        if !xtask.is_file() {
            testing::skipped("cargo has built no xtask: `cargo build --package xtask`");
            return None;
        }
        let place = Place::new();
        let registry = start_registry(&place)?;
        let tree = place.path("tree");
        let programs = ["bash", "cat", "id", "ls", "mkdir", "ps", "rm", "sh", "sleep", "true"];
        add_programs(&tree, &programs.map(|it| format!("/bin/{it}")).each_ref().map(|it| &**it));
        for folder in ["etc", "root", "srv", "usr/share/doc", "work", "www", "cache"] {
            fs::create_dir_all(tree.join(folder)).unwrap();
        }
        write(&tree.join("etc/os-release"), b"ID=debian\n", 0o644);
        write(&tree.join("etc/debian_version"), b"13.1\n", 0o644);
        write(&tree.join("etc/passwd"), b"root:x:0:0::/root:/bin/sh\n", 0o644);
        write(&tree.join("etc/group"), b"root:x:0:\n", 0o644);
        let mut tar = Command::new("tar");
        tar.arg("-czf").arg(place.path("debian.tar.gz")).arg("-C").arg(&tree).arg(".");
        assert!(tar.status().unwrap().success());
        place.out("import --quiet tar:debian.tar.gz bare");
        place.out("run --quiet -d --name change bare -- /bin/sleep 1000");
        let change = ["commit", "--quiet", "--change", "CMD [\"bash\"]", "change", "debian"];
        let ran = place.run_each(&change);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        place.out("rm --force change");
        for name in [
            "library/debian:latest",
            "library/debian:stable-slim",
            "library/debian:12",
            "library/debian:13",
            "library/nginx:latest",
            "owner/app:1.2",
        ] {
            place.out(&format!("push --quiet debian {}/{name}", registry.host));
        }
        fs::remove_dir_all(&tree).unwrap();
        Some(Self { place, registry, xtask })
    }

    /// Runs a script in a separate session, with the preconditions of `page`, for at most five minutes. On its
    /// terminal, `exit` is typed repeatedly, so that programs that read the terminal end.
    fn run(&self, page: &str, script: &str) -> Ran {
        let base = tempfile::tempdir_in(self.place.folder.path()).unwrap();
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let is_help = page.starts_with("help ");
        let given = |name: &str| GIVEN.iter().find(|it| it.0 == name).map_or("", |it| it.1);
        let common = if is_help { given("help ") } else { "" };
        let own = if given(page).is_empty() && is_help { USUAL } else { given(page) };
        let file = base.path().join("script");
        let text = format!(
            "{SANDBOX}\n( :\n{common}\n{own}\n) > ../given.log 2>&1 < /dev/null || {{ cat ../given.log; exit 1; }}\n\
             set -x\n{script}"
        );
        fs::write(&file, text).unwrap();
        let words = [
            base.path(),
            &repository(),
            Path::new(&self.registry.host),
            &self.xtask,
            Path::new(env!("CARGO_BIN_EXE_quire")),
        ];
        let words: Vec<_> = words.iter().map(|it| format!("'{}'", it.display())).collect();
        let inner = format!(
            "exec timeout --foreground --kill-after=5 300 \
             unshare --mount --pid --fork --kill-child --mount-proc --propagation private sh '{}' {}",
            file.display(),
            words.join(" ")
        );
        let mut command = Command::new("script");
        command.args(["--quiet", "--return", "--command", &inner, "/dev/null"]);
        // `script` starts the user's shell, so make it the same for all users who run this test.
        command
            .env("SHELL", "/bin/sh")
            .env_remove("QUIRE_STORE")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut typed = child.stdin.take().unwrap();
        let typing = std::thread::spawn(move || {
            use std::io::Write as _;
            let since = Instant::now();
            while since.elapsed() < Duration::from_secs(600) && typed.write_all(b"exit\n").is_ok() {
                std::thread::sleep(Duration::from_millis(300));
            }
        });
        let output = child.wait_with_output().unwrap();
        typing.join().unwrap();
        Ran::from_output(&output)
    }
}

/// Returns the lines that are run. Every other line is replaced by `:`, so that line numbers stay the same.
fn run_lines(page: &str, script: &str, used: &mut [bool]) -> String {
    let mut lines = String::new();
    for line in script.lines() {
        let whole = format!("{line}\n");
        // A comment may follow the command.
        let command = format!("{}\n", line.split("   #").next().unwrap_or_default().trim_end());
        let is_other = |it: &(&str, &str, &str)| {
            it.0 == page && (whole.starts_with(it.1) || command.starts_with(it.1))
        };
        match NOT_RUN.iter().position(is_other) {
            Some(at) => used[at] = true,
            // The exit code 1 means that the two images differ.
            None if line.starts_with("quire diff ") => {
                lines += &format!("{} || [ $? = 1 ]\n", command.trim_end());
            }
            None => lines += &whole,
        }
    }
    lines
}

/// Returns the last lines of a session's output, without the terminal's echo of the input.
fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().filter(|it| it.trim_end() != "exit").collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// Returns the examples of each verb's help.
fn examples(place: &Place) -> Vec<(String, String)> {
    let wide = |words: &[&str]| {
        let output = place.command(words).env("COLUMNS", "1000").output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let all = wide(&["--help"]);
    let verbs = all.lines().filter_map(|it| it.strip_prefix("  ")?.split_whitespace().next());
    let verbs = verbs.filter(|it| it.chars().all(|it| it.is_ascii_lowercase()) && *it != "help");
    let found = verbs.filter_map(|verb| {
        let help = wide(&["help", verb]);
        let (_, examples) = help.split_once("Examples:\n")?;
        let lines = examples.lines().map_while(|it| it.strip_prefix("  "));
        Some((format!("help {verb}"), lines.map(|it| format!("{it}\n")).collect()))
    });
    found.collect()
}

#[test]
fn code_blocks_of_pages_run() {
    let all = pages();
    // Commands in decisions and formats are not for readers to type.
    let read = |it: &&Page| {
        !["docs/decisions", "docs/format", "docs/performance"]
            .iter()
            .any(|other| it.path.starts_with(other))
    };
    let mut used = [false; NOT_RUN.len()];
    let mut scripts = Vec::new();
    for page in all.iter().filter(read) {
        // Each block has separate containers.
        const END: &str = "remove_containers > /dev/null 2>&1 || :\n";
        let blocks = page.blocks().into_iter().filter_map(|it| it.script());
        let blocks: Vec<_> = blocks.map(|it| run_lines(&page.path, &it, &mut used)).collect();
        let script: String = blocks.iter().flat_map(|it| [it.as_str(), END]).collect();
        if blocks.iter().any(|it| !it.trim().is_empty()) {
            scripts.push((page.path.clone(), script));
        }
    }
    assert!(all.is_empty() || scripts.len() >= 5, "{scripts:?}");
    let unused = NOT_RUN.iter().zip(used).filter(|(it, used)| !used && !it.0.starts_with("help "));
    let unused: Vec<_> = unused.map(|it| it.0).collect();
    assert!(all.is_empty() || unused.is_empty(), "remove from NOT_RUN: {unused:?}");
    let Some(session) = Session::new() else { return };
    let mut failed = Vec::new();
    for (page, script) in scripts {
        let ran = session.run(&page, &script);
        if ran.code != Some(0) {
            failed.push(format!("== {page}: exit code {:?}\n{}", ran.code, tail(&ran.out)));
        }
    }
    assert!(failed.is_empty(), "the last line with `+` failed:\n{}", failed.join("\n"));
}

/// The pages show the output of their sessions, except for numbers and digests, which each run changes.
#[test]
fn sessions_print_what_the_pages_show() {
    if !testing::programs(&["newuidmap", "setpriv"]) {
        return;
    }
    let Some(session) = Session::new() else { return };
    let source = format!("tar:{}", session.place.path("debian.tar.gz").display());
    let mut xtask = Command::new(&session.xtask);
    xtask.args(["session", "--check", "--source", &source, "--binary"]);
    let output = xtask.arg(env!("CARGO_BIN_EXE_quire")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn examples_of_help_run() {
    let Some(session) = Session::new() else { return };
    let mut used = [false; NOT_RUN.len()];
    let mut failed = Vec::new();
    let all = examples(&session.place);
    assert!(all.len() > 35, "{all:?}");
    for (page, examples) in all {
        let script = run_lines(&page, &examples, &mut used);
        if script.trim().is_empty() {
            continue;
        }
        let ran = session.run(&page, &script);
        if ran.code != Some(0) {
            failed.push(format!("== {page}: exit code {:?}\n{}", ran.code, tail(&ran.out)));
        }
    }
    let unused = NOT_RUN.iter().zip(used).filter(|(it, used)| !used && it.0.starts_with("help "));
    let unused: Vec<_> = unused.map(|it| it.0).collect();
    assert!(unused.is_empty(), "remove from NOT_RUN: {unused:?}");
    assert!(failed.is_empty(), "the last line with `+` failed:\n{}", failed.join("\n"));
}

/// Programs that read the TOML blocks, by a part of the blocks' first lines.
const TOML: [(&str, Reader); 11] = [
    ("default = \"none\"", Reader::Policy),
    ("[mounts]", Reader::Settings),
    ("[snapshotter]", Reader::Settings),
    ("lazy-timeout", Reader::Settings),
    ("# /etc/quire/serve.toml", Reader::Settings),
    ("# /etc/quire/certs.d/", Reader::Other), // hosts.toml
    ("server = \"https://registry", Reader::Other), // hosts.toml
    ("[proxy_plugins.quire]", Reader::Engine),
    ("[plugins.\"io.containerd.cri.v1.images\"]", Reader::Other), // containerd
    ("network = \"pasta\"", Reader::Other), // run.toml; the tests `run_defaults` read it
    ("snapshotter = \"quire\"", Reader::Other), // nerdctl
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// `serve.toml`
    Settings,
    /// `policy.toml`
    Policy,
    /// containerd; the lines are among those that `--print-config` prints.
    Engine,
    /// Another program.
    Other,
}

/// An unknown setting is an error, so each setting of a page must exist.
#[test]
fn settings_of_pages_are_taken() {
    let place = Place::new();
    let doctor = |text: &str| {
        fs::create_dir_all(place.path("root/etc/quire")).unwrap();
        write(&place.path("root/etc/quire/serve.toml"), text.as_bytes(), 0o644);
        let ran = place.run("doctor --root root");
        format!("{}{}", ran.out, ran.err)
    };
    let bad = "does not start";
    let said = doctor("[mounts]\nnosuch = 1\n");
    assert!(said.contains(bad), "{said}");
    for page in pages() {
        for block in page.blocks().into_iter().filter(|it| it.language == "toml") {
            let name = format!("{}:{}", page.path, block.line);
            let reader = TOML.iter().find(|it| block.text.starts_with(it.0));
            let reader = reader.unwrap_or_else(|| panic!("{name}: add its first line to TOML")).1;
            match reader {
                Reader::Settings => {
                    // Settings in comments are alternatives.
                    let lines = block.text.lines().map(|line| match line.strip_prefix("# ") {
                        Some(rest) if rest.contains(" = ") => {
                            rest.replace("0123…", &"0123".repeat(16))
                        }
                        _ => line.to_owned(),
                    });
                    let text: String = lines.map(|it| format!("{it}\n")).collect();
                    let said = doctor(&text);
                    assert!(!said.contains(bad), "{name}: {said}\n{text}");
                }
                Reader::Policy => policy(&name, &block.text),
                Reader::Engine => {
                    let line = "serve --snapshotter --print-config containerd --version 2.4";
                    let store = place.path("store").display().to_string();
                    let printed = place.out(line).replace(&store, "/var/lib/quire");
                    // The page may omit printed lines, but must not change them.
                    let mut printed = printed.lines();
                    for line in block.text.lines() {
                        assert!(printed.any(|it| it == line), "{name}: not printed: {line}");
                    }
                }
                Reader::Other => {}
            }
        }
    }
}

/// Checks a policy of a page, with a key if the page has one.
fn policy(name: &str, text: &str) {
    let place = Place::new();
    let Some(mut openssl) = testing::command("openssl") else { return };
    let key = place.path("ours.key");
    let made = openssl
        .args(["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out"])
        .arg(&key)
        .status();
    assert!(made.unwrap().success());
    let mut public = Command::new(testing::find_program("openssl").unwrap());
    public.args(["ec", "-pubout", "-in"]).arg(&key).arg("-out").arg(place.path("ours.pub"));
    assert!(public.output().unwrap().status.success());
    let text =
        text.replace("/etc/quire/keys/ours.pub", &place.path("ours.pub").display().to_string());
    write(&place.path("policy.toml"), text.as_bytes(), 0o644);
    place.tree("policed", "x");
    let ran = place.run("--policy policy.toml import --quiet dir:policed policed");
    assert_eq!(ran.code, Some(0), "{name}: {}", ran.err);
}
