//! The command lines whose calls are made to fail.

/// The content of the store before the round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Base {
    /// Only an unrelated image, `old:1`.
    Fresh,
    /// `app:1` in the form objects, and `packed:1`.
    App,
    /// `bb:1`, with a shell.
    Shell,
}

impl Base {
    pub(super) const ALL: [Self; 3] = [Self::Fresh, Self::App, Self::Shell];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::App => "app",
            Self::Shell => "shell",
        }
    }

    /// Returns the lines that make the base. A line that begins with `!` is for the shell; other lines are Quire's.
    pub(super) const fn lines(self) -> &'static [&'static str] {
        match self {
            Self::Fresh => FRESH,
            Self::App => &[
                "import tar:in/app.tar app:1 --form objects",
                "convert app:1 packed:1 --form packed",
            ],
            Self::Shell => SHELL,
        }
    }
}

const FRESH: &[&str] = &[
    "!mkdir -p in/tree/etc in/upper/etc out/mnt home",
    "!echo short > in/tree/etc/short; seq 1 20000 > in/tree/etc/long; ln in/tree/etc/long in/tree/etc/hard",
    "!ln -s etc/long in/tree/link; truncate -s 1M in/tree/sparse; echo end >> in/tree/sparse",
    "!setfattr -n user.word -v value in/tree/etc/short || true",
    "!echo new > in/upper/etc/new; seq 5 20005 > in/upper/etc/other",
    "!find in -exec touch -h -d @1600000000 {} +",
    "!tar -C in/tree --xattrs --sort=name -cf in/app.tar .",
    "import dir:in/upper old:1 --form objects",
    "--store in/store import tar:in/app.tar app:1 --form objects",
    "--store in/store export app:1 oci:in/layout:1 --compression gzip",
    "--store in/store export app:1 docker-archive:in/app.docker",
    "--store in/store push app:1 {host}/app:1",
    "--store in/store push --compression gzip app:1 {host}/lazy:1",
    "--store in/kept pull --form tar --keep-layers --index {host}/lazy:1 app:1",
    "--store in/kept index --push {host}/lazy:1 app:1",
    "!skopeo --insecure-policy copy --quiet --dest-tls-verify=false --dest-compress --dest-compress-format zstd:chunked oci:in/layout:1 docker://{host}/tables:1",
    "!$QUIRE --store in/store dump app:1 > in/app.dump",
    "!mkdir in/objects; $QUIRE build dir:in/tree in/built.erofs --digest-store in/objects",
];

const SHELL: &[&str] = &[
    "!mkdir -p in/bb/bin in/bb/proc in/bb/sys in/bb/dev in/bb/tmp in/bb/etc; cp /bin/busybox in/bb/bin/",
    "!for name in sh sleep cat true; do ln -s busybox in/bb/bin/$name; done; echo text > in/bb/etc/text",
    "!tar -C in/bb --sort=name -cf in/bb.tar .",
    "import tar:in/bb.tar bb:1 --form objects",
];

/// A command line, with the lines that show its effect.
#[derive(Debug, Clone, Copy)]
pub(super) struct Verb {
    pub(super) name: &'static str,
    pub(super) base: Base,
    /// Lines that run before each round, without faults.
    pub(super) before: &'static [&'static str],
    pub(super) line: &'static str,
    /// Standard input: a text, or the name of a file after a `<`.
    pub(super) input: &'static str,
    /// Lines that show the effect. They run without faults before and after the verb.
    pub(super) probes: &'static [&'static str],
    /// Lines that end the round, such as by stopping its containers.
    pub(super) after: &'static [&'static str],
}

const fn plain(name: &'static str, base: Base, line: &'static str) -> Verb {
    Verb { name, base, before: &[], line, input: "", probes: &[], after: &[] }
}

const fn makes(name: &'static str, base: Base, line: &'static str) -> Verb {
    Verb { probes: NEW, ..plain(name, base, line) }
}

const fn container(name: &'static str, line: &'static str) -> Verb {
    Verb { probes: CONTAINER, after: GONE, ..plain(name, Base::Shell, line) }
}

const fn snapshot(name: &'static str, line: &'static str) -> Verb {
    Verb { probes: SNAPSHOTS, after: CHILDREN_GONE, ..plain(name, Base::Shell, line) }
}

const fn volume(name: &'static str, line: &'static str) -> Verb {
    Verb { probes: VOLUMES, after: VOLUMES_GONE, ..plain(name, Base::Shell, line) }
}

const NEW: &[&str] = &["dump new:1", "verify"];
const CONTAINER: &[&str] = &["ps -a --json"];
const GONE: &[&str] = &["!$QUIRE rm -f flt; true"];
/// Without `durable`, because a failed sync in the background has no other effect.
const SNAPSHOTS: &[&str] = &["ps -a --json", "snapshot list --all"];
const VOLUMES: &[&str] = &["volume ls -q"];
const VOLUMES_GONE: &[&str] = &["!$QUIRE volume rm -f vol; true"];
const CHILDREN_GONE: &[&str] = &["!$QUIRE rm -f flt flt-child; true"];

use Base::{App, Fresh};

pub(super) const VERBS: &[Verb] = &[
    makes("import oci", Fresh, "import oci:in/layout:1 new:1 --form objects"),
    makes("import oci, packed", Fresh, "import oci:in/layout:1 new:1 --form packed"),
    makes("import oci, tar", Fresh, "import oci:in/layout:1 new:1 --form tar"),
    makes("import docker-archive", Fresh, "import docker-archive:in/app.docker new:1"),
    makes(
        "import docker-archive, packed",
        Fresh,
        "import docker-archive:in/app.docker new:1 --form packed",
    ),
    makes("import tar", Fresh, "import tar:in/app.tar new:1"),
    makes("import tar, packed", Fresh, "import tar:in/app.tar new:1 --form packed"),
    makes("import tar, tar", Fresh, "import tar:in/app.tar new:1 --form tar"),
    Verb { input: "<in/app.tar", ..makes("import of standard input", Fresh, "import tar:- new:1") },
    makes("import dir", Fresh, "import dir:in/tree new:1"),
    makes("import dir, packed", Fresh, "import dir:in/tree new:1 --form packed"),
    makes("import dump", Fresh, "import dump:in/app.dump new:1 --objects in/objects"),
    makes("pull", Fresh, "pull {host}/app:1 new:1"),
    makes("pull, packed", Fresh, "pull {host}/app:1 new:1 --form packed"),
    makes("pull, tar", Fresh, "pull {host}/app:1 new:1 --form tar"),
    makes("pull --lazy", Fresh, "pull --lazy=require {host}/lazy:1 new:1"),
    makes("pull --lazy, tables", Fresh, "pull --lazy=require {host}/tables:1 new:1"),
    Verb {
        before: &["pull --form tar --keep-layers {host}/lazy:1 new:1"],
        ..makes("index", Fresh, "index new:1")
    },
    Verb {
        before: &["pull --form tar --keep-layers --index {host}/lazy:1 new:1"],
        probes: &["referrers --json {host}/lazy:1"],
        ..plain("index --push", Fresh, "index --push {host}/lazy:1 new:1")
    },
    plain("referrers", Fresh, "referrers {host}/app:1"),
    Verb {
        probes: &[
            "!$QUIRE --store in/other pull --quiet {host}/push-{n}:1 && $QUIRE --store in/other dump {host}/push-{n}:1",
        ],
        ..plain("push", App, "push app:1 {host}/push-{n}:1")
    },
    plain("export oci", App, "export app:1 oci:out/layout:1"),
    plain("export docker-archive", App, "export app:1 docker-archive:out/archive"),
    plain("save", App, "save -o out/archive app:1 packed:1"),
    plain("save, OCI", App, "save --format oci-archive -o out/archive app:1"),
    Verb {
        before: &["!$QUIRE --store in/store save -o out/archive app:1"],
        ..plain("load", Fresh, "load -i out/archive")
    },
    plain("export tar", App, "export app:1 tar:out/tar"),
    plain("export tar to standard output", App, "export app:1 tar:-"),
    plain("export erofs", App, "export app:1 erofs:out/erofs"),
    plain("export gvisor", App, "export app:1 gvisor:out/gvisor"),
    plain("export disk", App, "export app:1 disk:out/disk"),
    makes("convert", App, "convert app:1 new:1 --form packed"),
    makes("convert to tar", App, "convert packed:1 new:1 --form tar"),
    makes("convert to objects", App, "convert packed:1 --form objects"),
    makes("merge", App, "merge app:1 old:1 new:1"),
    makes("filter", App, "filter app:1 new:1 --include /etc"),
    makes("tag", App, "tag app:1 new:1"),
    Verb {
        before: &["!openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out out/key"],
        ..plain("sign", App, "sign app:1 --key out/key")
    },
    plain("rmi", App, "rmi app:1"),
    plain("untag", App, "untag app:1"),
    Verb { before: &["rmi app:1", "rmi packed:1"], ..plain("gc", App, "gc") },
    Verb { before: &["rmi app:1"], ..plain("gc of a packed image", App, "gc") },
    plain("fsck", App, "fsck"),
    plain("fsck --deep", App, "fsck --deep"),
    Verb {
        before: &[
            "!for it in store/objects/*/*; do test $(stat -c %s $it) -lt 1000000 || { chmod u+w $it; echo x | dd of=$it conv=notrunc status=none; break; }; done",
        ],
        ..plain("fsck --repair", App, "fsck --repair")
    },
    plain("verify", App, "verify app:1 packed:1"),
    plain("du", App, "du --json"),
    plain("ls", App, "ls -l app:1:/etc"),
    plain("tree", App, "tree app:1"),
    Verb { before: &["!chattr -R -f -i store; true"], ..plain("unseal", App, "unseal") },
    plain("cat", App, "cat app:1:/etc/long"),
    plain("cat, packed", App, "cat packed:1:/etc/long"),
    plain("show", App, "show app:1"),
    plain("inspect of an image", App, "inspect app:1"),
    plain("history", App, "history app:1"),
    plain("system df", App, "system df"),
    plain("images", App, "images --json"),
    plain("dump", App, "dump app:1"),
    plain("diff of images", App, "diff app:1 old:1"),
    Verb {
        before: OBJECTS,
        ..plain("build", Fresh, "build dir:in/tree out/image --digest-store out/objects")
    },
    plain("build of a dump", Fresh, "build dump:in/app.dump out/image --objects in/objects"),
    Verb {
        probes: &["!cat out/mnt/etc/long"],
        after: UNMOUNT,
        ..plain("mount", App, "mount app:1 out/mnt")
    },
    Verb {
        probes: &["!cat out/mnt/etc/long"],
        after: UNMOUNT,
        ..plain("mount, packed", App, "mount packed:1 out/mnt")
    },
    Verb {
        probes: &["!cat out/mnt/etc/long"],
        after: UNMOUNT,
        ..plain("mount, writable", App, "mount app:1 out/mnt --writable self,size=16m")
    },
    Verb {
        before: LAZY,
        probes: &["!cat out/mnt/etc/long"],
        after: NO_SERVICE,
        ..plain("mount --lazy", Fresh, "mount --lazy new:1 out/mnt")
    },
    Verb { before: LAZY, after: NO_SERVICE, ..plain("ps --lazy", Fresh, "ps --lazy --json") },
    Verb {
        probes: &["!cat out/bundle/rootfs/etc/text"],
        after: &["!umount out/bundle/rootfs 2> out/ignored; rm -f out/ignored; true"],
        ..plain("bundle", Base::Shell, "bundle bb:1 out/bundle sh")
    },
    Verb {
        before: &["mount app:1 out/mnt"],
        after: UNMOUNT,
        ..plain("umount", App, "umount out/mnt")
    },
    container("run", "run --name flt bb:1 -- sh -c 'cat /etc/text; echo new > /new; exit 3'"),
    container(
        "run --writable memory",
        "run --name flt --writable memory bb:1 -- sh -c 'cat /etc/text; echo new > /new; exit 3'",
    ),
    Verb {
        before: &["!mkdir changes"],
        ..container(
            "run --writable dir",
            "run --name flt --writable dir=changes bb:1 -- sh -c 'cat /etc/text; echo new > /new; exit 3'",
        )
    },
    container(
        "run --read-only",
        "run --name flt --read-only bb:1 -- sh -c 'cat /etc/text; exit 3'",
    ),
    container(
        "run --userns auto",
        "run --name flt --userns auto bb:1 -- sh -c 'cat /etc/text; exit 3'",
    ),
    Verb {
        probes: &["ps -a --json", "logs flt"],
        ..container("run -d", "run -d --name flt bb:1 -- sh -c 'cat /etc/text; sleep 0.05; exit 3'")
    },
    Verb { before: RUNNING, ..container("exec", "exec flt sh -c 'cat /etc/text; exit 3'") },
    Verb { before: RUNNING, ..container("stop", "stop -t 0 flt") },
    Verb { before: RUNNING, ..container("kill", "kill flt") },
    Verb { before: RUNNING, ..container("inspect", "inspect flt") },
    Verb { before: RUNNING, ..container("cp", "cp flt:/etc/text -") },
    Verb { before: ENDED, ..container("cp of an ended container", "cp flt:/etc/text -") },
    Verb {
        before: &["run -d --name flt bb:1 -- sh -c 'sleep 0.1; exit 3'"],
        ..container("wait", "wait flt")
    },
    Verb { before: ENDED, ..container("rm of a container", "rm flt") },
    container("create", "create --name flt bb:1 -- sh -c 'cat /etc/text; exit 3'"),
    Verb {
        before: &["create --name flt bb:1 -- sh -c 'echo new > /new; sleep 30'"],
        ..container("start", "start flt")
    },
    Verb { before: RUNNING, ..container("restart", "restart -t 0 flt") },
    Verb { before: ENDED, ..snapshot("snapshot create", "snapshot create flt point") },
    Verb {
        before: RUNNING,
        ..snapshot("snapshot create while it runs", "snapshot create flt point")
    },
    Verb { before: POINT, ..snapshot("snapshot list", "snapshot list") },
    Verb { before: POINT, ..snapshot("snapshot rm", "snapshot rm point") },
    Verb {
        before: POINT,
        ..snapshot("run --from", "run --name flt-child --from point -- sh -c 'cat /new; exit 3'")
    },
    Verb { before: RUNNING, ..snapshot("fork", "fork --name flt-child flt") },
    volume("volume create", "volume create vol"),
    Verb { before: &["volume create vol"], ..volume("volume rm", "volume rm vol") },
    Verb { before: ENDED_POINT, ..snapshot("rollback", "rollback flt point") },
    Verb {
        before: ENDED,
        probes: &["ps -a --json", "dump new:1"],
        ..container("commit", "commit flt new:1")
    },
    Verb {
        before: RUNNING,
        probes: &["ps -a --json", "dump new:1"],
        ..container("commit while it runs", "commit flt new:1")
    },
    Verb { before: ENDED, ..container("export changes", "export flt changes:out/changes") },
    Verb {
        before: ENDED,
        ..container("export changes to standard output", "export flt changes:-")
    },
    Verb { before: ENDED, ..container("diff of a container", "diff flt") },
    Verb { before: ENDED, ..container("du of a container", "du") },
    Verb { before: ENDED, ..container("ps", "ps -a") },
    Verb { before: ENDED, ..container("logs", "logs flt") },
    Verb { before: ENDED, ..container("logs --follow", "logs --follow flt") },
    Verb {
        input: "secret",
        probes: &["!cat out/auth.json"],
        ..plain("login", Fresh, "login -u me --password-stdin --authfile out/auth.json {host}")
    },
    Verb {
        before: &[
            "!echo secret | $QUIRE login -u me --password-stdin --authfile out/auth.json {host}",
        ],
        probes: &["!cat out/auth.json"],
        ..plain("logout", Fresh, "logout --authfile out/auth.json {host}")
    },
    Verb {
        before: OBJECTS,
        ..plain("mkcomposefs", Fresh, "@mkcomposefs --digest-store=out/objects in/tree out/image")
    },
    plain("mkcomposefs of a dump", Fresh, "@mkcomposefs --from-file in/app.dump out/image"),
    plain("composefs-info", Fresh, "@composefs-info ls in/built.erofs"),
    plain("composefs-info dump", Fresh, "@composefs-info dump in/built.erofs"),
    Verb {
        probes: &["!cat out/mnt/etc/long"],
        after: UNMOUNT,
        ..plain(
            "mount.composefs",
            Fresh,
            "@mount.composefs in/built.erofs out/mnt -o basedir=in/objects",
        )
    },
];

const OBJECTS: &[&str] = &["!mkdir out/objects"];
const UNMOUNT: &[&str] = &["!umount out/mnt 2> out/ignored; rm -f out/ignored; true"];
/// Starts a service for the verb. If the command started the service itself, the service would be part of the
/// command.
const LAZY: &[&str] = &[
    "pull --lazy=require {host}/lazy:1 new:1",
    "!setsid $QUIRE serve --lazy > out/ignored 2>&1 < /dev/null & echo $! > service; until $QUIRE ps --lazy --metrics | grep -q '^quire_lazy_up 1'; do sleep 0.02; done; rm -f out/ignored",
];
const NO_SERVICE: &[&str] = &[
    "!umount out/mnt 2> out/ignored; rm -f out/ignored; true",
    "!kill $(cat service); while test -e /proc/$(cat service)/exe; do sleep 0.02; done; rm service",
];
const RUNNING: &[&str] = &["run -d --name flt bb:1 -- sh -c 'echo new > /new; sleep 30'"];
const ENDED: &[&str] = &[
    "run -d --name flt bb:1 -- sh -c 'cat /etc/text; echo new > /new; mkdir /dir; exit 3'",
    "wait flt",
];
const POINT: &[&str] =
    &["run -d --name flt bb:1 -- sh -c 'echo new > /new; sleep 30'", "snapshot create flt point"];
const ENDED_POINT: &[&str] = &[
    "run -d --name flt bb:1 -- sh -c 'echo new > /new; exit 3'",
    "wait flt",
    "snapshot create flt point",
];
