//! The named layouts. `testdata/composefs-rs/ids` has their ids, so a change of a layout changes that file.

use super::OddLayout;
use super::tar::{Meta, Tar};
use crate::noise;

/// A value of `security.capability`: version 2, effective, `cap_net_raw`. Source: `linux/capability.h`.
const CAPABILITY: &[u8] = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// Makes the layers of a layout.
type Layers = fn() -> Vec<Tar>;

/// Returns all layouts. composefs-rs refuses those whose name begins with `refused`.
#[must_use]
pub fn odd_layouts() -> Vec<OddLayout> {
    let cases: [(&str, Layers); 19] = [
        ("sizes", sizes),
        ("symlinks", symlinks),
        ("whiteouts", whiteouts),
        ("devices", devices),
        ("links", links),
        ("xattrs", xattrs),
        ("metadata", metadata),
        ("names", names),
        ("replaced", replaced),
        ("boot", boot),
        ("selinux", selinux),
        ("root", root),
        ("refused-no-usr", || vec![tar(|it| it.dir("etc"))]),
        ("refused-usr-symlink", || vec![tar(|it| it.dir("lib").symlink("usr", "lib"))]),
        ("refused-run-symlink", || vec![tar(|it| it.dir("usr").symlink("run", "usr"))]),
        ("refused-no-parent", || vec![tar(|it| it.dir("usr").file("usr/lib/a", "a"))]),
        ("refused-through-symlink", || {
            vec![
                tar(|it| it.dir("usr").dir("usr/lib").symlink("lib", "usr/lib")),
                tar(|it| it.file("lib/a", "a")),
            ]
        }),
        ("refused-link-to-later", || {
            vec![tar(|it| it.dir("usr").link("usr/b", "usr/a").file("usr/a", "a"))]
        }),
        ("refused-link-to-directory", || vec![tar(|it| it.dir("usr").link("a", "usr"))]),
    ];
    let made = cases.into_iter().map(|(name, layers)| OddLayout {
        name: name.to_owned(),
        layers: lowest(name).into_iter().chain(layers()).map(Tar::finish).collect(),
    });
    made.collect()
}

/// Returns a layer with the directories that a boot needs. `root` and the refused layouts do not have it.
fn lowest(name: &str) -> Option<Tar> {
    let has = name != "root" && !name.starts_with("refused");
    has.then(|| tar(|it| it.dir("boot").dir("sysroot").file("boot/kernel", "k")))
}

fn tar(entries: impl FnOnce(&mut Tar) -> &mut Tar) -> Tar {
    let mut tar = Tar::default();
    entries(&mut tar);
    tar
}

/// Content around the limits of inline files, of blocks and of levels of the Merkle tree.
fn sizes() -> Vec<Tar> {
    let mut tar = Tar::default();
    tar.dir("usr");
    let bytes = noise(600_000);
    let sizes =
        [0, 1, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, 262_144, 262_145, 524_288, 524_289];
    for size in sizes {
        tar.file(format!("usr/{size}"), &bytes[..size]);
    }
    tar.file("usr/again", &bytes[..4097]).file("usr/small", &bytes[..64]);
    vec![tar]
}

fn symlinks() -> Vec<Tar> {
    let mut tar = Tar::default();
    tar.dir("usr");
    for length in [1, 60, 100, 101, 1023, 1024, 1025, 2047, 2048, 4000, 4031, 4063, 4064, 4095] {
        tar.symlink(format!("usr/{length}"), vec![b't'; length]);
    }
    for number in 0..40 {
        tar.symlink(format!("usr/many{number}"), vec![b'm'; 97 * number + 1]);
    }
    tar.entry(b"usr/mode", b'2', &Meta::mode(0o755), b"target", b"", (0, 0));
    vec![tar]
}

/// Whiteouts, also of entries of the same layer, before and after these entries.
fn whiteouts() -> Vec<Tar> {
    let lower = tar(|it| {
        it.dir("usr").dir("etc").dir("opaque").dir("opaque/sub").dir("late");
        it.file("usr/hidden", "h").file("usr/kept", "k").file("opaque/a", "a");
        it.file("opaque/sub/b", "b").file("late/c", "c").dir("gone").file("gone/d", "d")
    });
    let middle = tar(|it| {
        it.file("usr/.wh.hidden", "").file("usr/own", "o").file("usr/.wh.own", "");
        it.file("opaque/new", "n").file("opaque/.wh..wh..opq", "").file("opaque/after", "a");
        it.file(".wh.gone", "").file("usr/.wh.absent", "").file("late/.wh..wh.plnk", "")
    });
    let upper = tar(|it| {
        it.dir("gone")
            .file("gone/e", "e")
            .file("late/.wh.", "")
            .file("usr/.wh.kept", "x".repeat(90));
        it.file("usr/last", "l".repeat(100))
    });
    vec![lower, middle, upper]
}

/// Devices 0:0, which images cannot contain as they are, and others.
fn devices() -> Vec<Tar> {
    let plain = Meta::mode(0o644);
    vec![tar(|it| {
        it.dir("usr").dir("dev").dir("dev/deep");
        it.special("dev/null", b'3', &Meta::mode(0o666), (1, 3));
        it.special("dev/sda", b'4', &Meta::mode(0o660).owner(0, 6), (8, 0));
        it.special("dev/big", b'3', &plain, (4095, 1_048_575));
        it.special("dev/pipe", b'6', &Meta::mode(0o600), (0, 0));
        it.special("dev/white", b'3', &plain, (0, 0));
        it.special("dev/deep/white", b'3', &Meta::mode(0).time(5, 7), (0, 0));
        it.special("dev/block", b'4', &plain, (0, 0));
        // Names of the directories of objects, which every image hides by devices 0:0.
        it.special("a0", b'3', &plain, (0, 0)).special("a1", b'3', &Meta::mode(0o600), (0, 0));
        it.special("a2", b'3', &plain.clone().owner(1, 0), (0, 0));
        it.special("A3", b'3', &plain, (0, 0)).special("zz", b'3', &plain, (0, 0));
        it.file("00", "zero").dir("ff").file("ff/00", "f").symlink("0a", "00")
    })]
}

/// Hard links, whose first name differs by the order of names.
fn links() -> Vec<Tar> {
    let content = noise(5000);
    let lower = tar(|it| {
        it.dir("usr").dir("a").dir("a.b").dir("z").dir("z/deep");
        it.file("a.b/one", &content).link("a/one", "a.b/one").link("z/deep/one", "a/one");
        it.file("z/two", "two").link("usr/two", "z/two").link("usr/zwei", "z/two");
        it.symlink("z/link", "two").link("a/link", "z/link");
        it.special("z/pipe", b'6', &Meta::mode(0o600), (0, 0)).link("a/pipe", "z/pipe")
    });
    let upper = tar(|it| {
        it.link("usr/one", "./a.b/one").file("a.b/one", "another");
        it.link("usr/chain", "usr/one").file("z/.wh.two", "").link("usr/dos", "/usr/zwei")
    });
    vec![lower, upper]
}

fn xattrs() -> Vec<Tar> {
    let with = |name, value: &[u8]| Meta::mode(0o755).xattr(name, value);
    let acl =
        b"\x02\0\0\0\x01\0\x07\0\xff\xff\xff\xff\x02\0\x04\0\x01\0\0\0\x04\0\x05\0\xff\xff\xff\xff\
        \x10\0\x05\0\xff\xff\xff\xff\x20\0\x05\0\xff\xff\xff\xff";
    vec![tar(|it| {
        it.dir_as("usr", &with("user.note", b"usr").xattr("security.capability", CAPABILITY));
        it.file_as("usr/ping", &with("security.capability", CAPABILITY), noise(300));
        it.file_as("usr/ping6", &with("security.capability", CAPABILITY), noise(200));
        it.file_as("usr/other", &with("security.capability", b"\x01\0\0\x02"), "o");
        it.file_as("usr/label", &with("security.selinux", b"system_u:object_r:bin_t:s0\0"), "l");
        it.file_as("usr/user", &with("user.note", b"n"), "u");
        it.file_as("usr/overlay", &with("trusted.overlay.opaque", b"y"), "o");
        it.file_as("usr/acl", &with("system.posix_acl_access", acl), "a");
        it.file_as("usr/ima", &with("security.ima", b"i").xattr("trusted.md5sum", b"m"), "i")
    })]
}

/// Owners, modes and times that need the long form of inodes.
fn metadata() -> Vec<Tar> {
    vec![tar(|it| {
        it.dir_as("usr", &Meta::mode(0o755).time(1_600_000_000, 123_456_789));
        it.file_as("usr/setuid", &Meta::mode(0o4755), "s").file_as("usr/none", &Meta::mode(0), "n");
        it.dir_as("usr/sticky", &Meta::mode(0o1777)).dir_as("usr/group", &Meta::mode(0o2755));
        for (number, owner) in
            [(65_535, 1), (65_536, 2), (2, 65_536), (4_000_000_000, 9)].iter().enumerate()
        {
            it.file_as(format!("usr/{number}"), &Meta::mode(0o644).owner(owner.0, owner.1), "o");
        }
        it.file_as("usr/old", &Meta::mode(0o644).time(0, 0), "o");
        it.file_as("usr/oldish", &Meta::mode(0o644).time(0, 1), "o");
        it.file_as("usr/future", &Meta::mode(0o644).time(5_000_000_000, 999_999_999), "f");
        it.file_as("usr/tenth", &Meta::mode(0o644).time(9, 100_000_000), "t")
    })]
}

/// Names of any bytes, and directories of several blocks.
fn names() -> Vec<Tar> {
    let mut tar = Tar::default();
    tar.dir("usr").dir("usr/many").dir("usr/half");
    for number in 0..300 {
        tar.file(format!("usr/many/a-name-that-takes-some-room-{number}"), number.to_string());
    }
    for number in 0..60 {
        tar.file(format!("usr/half/a-name-that-takes-some-room-{number}"), "");
    }
    for name in
        [&b"usr/\xff\xfe"[..], b"usr/new\nline", b"usr/ ", b"usr/-", b"usr/\xc3\xa4", b"usr/..."]
    {
        tar.file(name, "n");
    }
    tar.file([&b"usr/"[..], &[b'n'; 255]].concat(), "long");
    let mut deep = b"usr".to_vec();
    for _ in 0..40 {
        deep.extend_from_slice(b"/deep");
        tar.dir(&deep);
    }
    vec![tar]
}

/// Entries that replace others, of lower layers and of the same layer.
fn replaced() -> Vec<Tar> {
    let lower = tar(|it| {
        it.dir("usr").dir("dir").file("dir/a", "a").file("file", "f").symlink("link", "dir");
        it.file("twice", "first").file("twice", "second").dir_as("dir", &Meta::mode(0o700))
    });
    let upper = tar(|it| {
        it.file("dir", "a file").dir("file").file("file/b", "b").dir("link").file("link/c", "c");
        it.dir_as("usr", &Meta::mode(0o711).owner(7, 8).time(77, 0)).file("usr/d", "d");
        it.dir_as(".", &Meta::mode(0o700).owner(3, 3).time(3, 0))
    });
    vec![lower, upper]
}

/// Directories that are emptied.
fn boot() -> Vec<Tar> {
    let late = Meta::mode(0o750).time(1_650_000_000, 42);
    vec![tar(|it| {
        it.dir_as("usr", &Meta::mode(0o755).time(1_600_000_000, 5));
        it.dir_as("boot", &late).file("boot/vmlinuz", noise(70_000)).dir("boot/loader");
        it.dir_as("sysroot", &late).dir("sysroot/ostree").file("sysroot/ostree/a", "a");
        it.dir_as("run", &late).dir("run/lock").file("run/secret", noise(100));
        it.link("usr/vmlinuz", "boot/vmlinuz").file_as("usr/old", &Meta::mode(0o644).time(1, 0), "")
    })]
}

/// A policy that labels files.
fn selinux() -> Vec<Tar> {
    let contexts = "# a comment\n\
        /.*\t\tsystem_u:object_r:default_t:s0\n\
        /\t-d\tsystem_u:object_r:root_t:s0\n\
        /usr(/.*)?\tsystem_u:object_r:usr_t:s0\n\
        /usr/bin(/.*)?\t--\tsystem_u:object_r:bin_t:s0\n\
        /usr/bin/[a-c]+\\.d\t-d\tsystem_u:object_r:bin_dir_t:s0\n\
        /usr/lib(64)?(/.*)?   system_u:object_r:lib_t:s0\n\
        /dev/.*\t-c\tsystem_u:object_r:device_t:s0\n\
        /dev/.*\t-b\tsystem_u:object_r:fixed_t:s0\n\
        /dev/.*\t-p\tsystem_u:object_r:fifo_t:s0\n\
        /usr/link.*\t-l\tsystem_u:object_r:link_t:s0\n\
        /proc(/.*)?\t<<none>>\n\
        \n\
        /people/[^/]+(/.*)?\tsystem_u:object_r:user_home_t:s0\n";
    let shared = noise(100);
    vec![tar(|it| {
        it.dir("usr").dir("usr/bin").dir("usr/bin/abc.d").dir("usr/lib").dir("usr/lib64");
        it.dir("boot").file("boot/a", "a").dir("sysroot").dir("run").dir("proc").dir("dev");
        for path in ["etc", "etc/selinux", "etc/selinux/targeted", "etc/selinux/targeted/contexts"]
        {
            it.dir(path);
        }
        it.dir("etc/selinux/targeted/contexts/files");
        it.file(
            "etc/selinux/config",
            "# SELINUXTYPE=no\nSELINUX=enforcing\n SelinuxType = targeted \n",
        );
        let files = "etc/selinux/targeted/contexts/files";
        it.file(format!("{files}/file_contexts"), contexts);
        it.file(
            format!("{files}/file_contexts.local"),
            "/usr/local.*\tsystem_u:object_r:local_t:s0\n",
        );
        it.file(
            format!("{files}/file_contexts.homedirs"),
            "/people\t-d\tsystem_u:object_r:home_root_t:s0\n",
        );
        it.file(
            format!("{files}/file_contexts.subs"),
            "/lib64 /usr/lib64\n# no\n/srv/people /people\n",
        );
        it.file(format!("{files}/file_contexts.subs_dist"), "/sbin /usr/bin\n");
        it.file("usr/bin/sh", &shared)
            .link("usr/lib/sh", "usr/bin/sh")
            .link("usr/bin/bash", "usr/bin/sh");
        it.link("usr/share", "usr/bin/sh").link("usr/other", "usr/bin/sh");
        it.dir("lib64").file("lib64/libc", &shared).dir("sbin").file("sbin/init", &shared);
        it.dir("people").dir("people/me").file("people/me/a", "a").dir("srv").dir("srv/people");
        it.dir("srv/people/me")
            .file("srv/people/me/a", "b")
            .file("usr/local", "l")
            .file("proc/a", "");
        it.symlink("usr/linked", "bin").file(b"usr/bin/new\nline", "").file(b"usr/bin/\xff", "");
        it.special("dev/null", b'3', &Meta::mode(0o666), (1, 3));
        it.special("dev/sda", b'4', &Meta::mode(0o600), (8, 0));
        it.special("dev/pipe", b'6', &Meta::mode(0o600), (0, 0));
        it.file_as("usr/labelled", &Meta::mode(0o644).xattr("security.selinux", b"old"), "l")
    })]
}

/// The least image.
fn root() -> Vec<Tar> {
    vec![tar(|it| it.dir_as("usr", &Meta::mode(0o751).owner(1, 2).time(12_345, 6))), Tar::default()]
}
