use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use serde_json::json;

use super::*;

/// Creates a root with links of every kind, and a host directory with a program.
fn root(folder: &Path) -> RuntimeSpec {
    let root = folder.join("root");
    for directory in ["usr/opt", "proc", "dev", "sys", "den/deep"] {
        std::fs::create_dir_all(root.join(directory)).unwrap();
    }
    for (link, to) in [
        ("opt", "usr/opt"),
        ("up", "../../../den"),
        ("escape", "/proc/self/fd/22"),
        ("parts", "den/deep/../../proc/self"),
        ("chain", "/escape"),
        ("loop", "loop"),
        ("device", "/dev/fd/7"),
        ("host", "/opt/shared/../../../den"),
    ] {
        symlink(to, root.join(link)).unwrap();
    }
    std::fs::write(root.join("file"), "").unwrap();
    let shared = folder.join("shared");
    std::fs::create_dir_all(shared.join("inner")).unwrap();
    symlink("/den", shared.join("link")).unwrap();
    std::fs::write(shared.join("tool"), "#!x").unwrap();
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(shared.join("tool"), mode).unwrap();
    let config = json!({"root": {"readonly": true}, "mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm"},
        {"destination": "/sys", "type": "bind", "source": "/sys"},
        {"destination": "/opt/shared", "type": "bind", "source": shared, "options": ["rbind", "ro"]},
        {"destination": "/opt/tool", "type": "bind", "source": shared.join("tool"), "options": []},
        {"destination": "/new/place", "type": "tmpfs", "source": "tmpfs", "options": ["rw"]},
    ]});
    serde_json::from_value(config).unwrap()
}

#[test]
fn working_directories_stay_inside() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = root(folder.path());
    let fd = std::fs::File::open(folder.path().join("root")).unwrap();
    let check = |config: &RuntimeSpec, path: &str, expect: Result<&str, &str>| {
        let found = View::of_bundle(fd.as_fd(), config).working_dir(path);
        let found = found.map_err(|it| it.to_string());
        match (&found, expect) {
            (Ok(found), Ok(expect)) => assert_eq!(found, expect, "{path}"),
            (Err(found), Err(expect)) => assert!(found.contains(expect), "{path}: {found}"),
            _ => panic!("{path}: {found:?}, not {expect:?}"),
        }
    };
    for (path, expect) in [
        ("/", Ok("/")),
        ("/..", Ok("/")),
        ("//den/./deep/", Ok("/den/deep")),
        ("/up", Ok("/den")),
        ("/opt", Ok("/usr/opt")),
        ("/opt/shared/inner", Ok("/usr/opt/shared/inner")),
        ("/opt/shared/link/deep", Ok("/den/deep")),
        ("/host", Ok("/den")),
        ("/proc", Ok("/proc")),
        ("/dev/shm", Ok("/dev/shm")),
        ("/dev/shm/new", Ok("/dev/shm/new")),
        ("/new/place/x", Ok("/new/place/x")),
        ("/proc/..", Ok("/")),
        ("den", Err("not an absolute path")),
        ("/file", Err("not a directory")),
        ("/file/x", Err("not a directory")),
        ("/opt/tool", Err("not a directory")),
        ("/den/new", Err("cannot be made in a read-only")),
        ("/opt/shared/new", Err("cannot be made in a read-only")),
        ("/loop", Err("too many links")),
        ("/escape", Err("/proc/self/fd/22, and no program")),
        ("/chain", Err("/proc/self/fd/22, and no program")),
        ("/parts/fd/3", Err("/proc/self/fd/3, and no program")),
        ("/device", Err("/dev/fd/7, and no program")),
        ("/sys/kernel", Err("/sys/kernel, and no program")),
        ("/proc/self/fd/22/../../..", Ok("/proc")),
    ] {
        check(&config, path, expect);
    }
    config.root.readonly = false;
    let (name, deep) = (format!("/new/{}", "n".repeat(256)), "/d".repeat(1025));
    for long in [&*name, &format!("{name}/x"), &format!("/den{name}"), &deep] {
        check(&config, long, Err("bytes, or with a name of more than 255: choose another"));
    }
    check(&config, &name[..260], Ok(&name[..260]));
    check(&config, &deep[..2048], Ok(&deep[..2048]));
    check(&config, "/den/new/one", Ok("/den/new/one"));
    check(&config, "/opt/shared/new", Err("cannot be made in a read-only"));
    for number in 0..40 {
        check(&config, &format!("/proc/self/fd/{number}"), Err("no program"));
    }
}

#[test]
fn files_are_mounted_inside_or_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = root(folder.path());
    let host = folder.path().join("root");
    symlink("../../../../../../etc/shadow", host.join("up-file")).unwrap();
    symlink("/opt/shared/tool", host.join("shared-tool")).unwrap();
    symlink("new/place/file", host.join("fresh")).unwrap();
    let fd = std::fs::File::open(&host).unwrap();
    let check = |config: &RuntimeSpec, path: &str, expect: FilePlace| {
        let found = View::of_bundle(fd.as_fd(), config).file_place(path.as_bytes());
        assert_eq!(found, Ok(expect), "{path}");
    };
    let at = |path: &str| FilePlace::At(path.to_owned());
    let absent = |path: &str| FilePlace::Absent(path.to_owned());
    for (path, expect) in [
        ("/file", at("/file")),
        ("/../file", at("/file")),
        ("/fresh", at("/new/place/file")),
        ("/up-file", absent("/etc/shadow")),
        ("/den/none", absent("/den/none")),
    ] {
        check(&config, path, expect);
    }
    for path in [
        "/",
        "/den",
        "/file/x",
        "/loop",
        "/escape",
        "/chain",
        "/device",
        "/proc/mounts",
        "/dev/shm",
        "/new/place",
        "/opt/tool",
        "/opt/shared/tool",
        "/opt/shared/none",
        "/shared-tool",
    ] {
        check(&config, path, FilePlace::Taken);
    }
    config.root.readonly = false;
    check(&config, "/up-file", at("/etc/shadow"));
    check(&config, "/den/none", at("/den/none"));
    check(&config, "/opt/shared/none", FilePlace::Taken);
}

#[test]
fn a_mount_that_cannot_be_opened_fails_the_look() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = root(folder.path());
    let fd = std::fs::File::open(folder.path().join("root")).unwrap();
    let look = |config: &RuntimeSpec| View::of_bundle(fd.as_fd(), config).places(&["/file"]);
    let at = Ok(vec![FilePlace::At("/file".to_owned())]);
    assert_eq!(look(&config), at);
    // The second source causes an error other than a missing file. It represents errors such as a lack of free file
    // descriptors.
    for (source, expect) in [("/none", at), ("/no\0ne", Err(Errno::INVAL))] {
        config.mounts.push(SpecMount::new("/den", "bind", source, &[]));
        assert_eq!(look(&config), expect, "{source}");
    }
}

#[test]
fn odd_links_of_an_image_have_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let long = format!("/{}", "n".repeat(256));
    let deep = "/d".repeat(1500);
    for (name, target) in [
        ("above", "/x"),
        ("below", "/x/y"),
        ("beside", "/xy"),
        ("long", &long),
        ("long-below", &format!("/none{long}")),
        ("deep", &deep),
    ] {
        symlink(target, folder.path().join(name)).unwrap();
    }
    let root = std::fs::File::open(folder.path()).unwrap();
    let at = |path: &str| FilePlace::At(path.to_owned());
    let absent = |path: &str| FilePlace::Absent(path.to_owned());
    for (access, place) in
        [(Access::ReadOnly, &absent as &dyn Fn(&str) -> FilePlace), (Access::Writable, &at)]
    {
        let view = View::of_root(root.as_fd(), access);
        let check = |paths: [&str; 3], expect: [FilePlace; 3]| {
            assert_eq!(view.places(&paths), Ok(expect.to_vec()), "{paths:?}");
        };
        let taken = || FilePlace::Taken;
        check(["/above", "/below", "/beside"], [place("/x"), taken(), place("/xy")]);
        check(["/below", "/above", "/below"], [place("/x/y"), taken(), place("/x/y")]);
        check(["/long", "/long-below", "/deep"], [taken(), taken(), taken()]);
    }
}

#[test]
fn programs_are_found_where_they_will_be() {
    let folder = tempfile::tempdir().unwrap();
    let config = root(folder.path());
    let fd = std::fs::File::open(folder.path().join("root")).unwrap();
    let view = View::of_bundle(fd.as_fd(), &config);
    for (path, expect) in [
        ("/opt/shared/tool", Executable::Yes),
        ("/opt/tool", Executable::Yes),
        ("/usr/opt/tool", Executable::Yes),
        ("/opt/shared", Executable::No),
        ("/file", Executable::No),
        ("/", Executable::No),
        ("/none", Executable::Absent),
        ("/file/none", Executable::Absent),
        ("/new/place/tool", Executable::Absent),
        ("/proc/self/exe", Executable::Absent),
    ] {
        assert_eq!(view.executable(path.as_bytes()), expect, "{path}");
    }
    assert_eq!(view.read_start(b"/opt/tool", 2).unwrap(), b"#!");
    assert_eq!(view.read_start(b"/opt", 2), None);
}

#[test]
fn the_kernel_follows_no_magic_links() {
    let host = std::fs::File::open("/").unwrap();
    assert_eq!(check_inside(host.as_fd(), "/proc/self"), Ok(()));
    let number = host.as_raw_fd();
    for path in [format!("/proc/self/fd/{number}"), "/proc/self/cwd".to_owned()] {
        assert_eq!(check_inside(host.as_fd(), &path), Err(WorkingDirError::Links(path)));
    }
    let check = |path: &str, expect: fn(String) -> WorkingDirError| {
        assert_eq!(check_inside(host.as_fd(), path), Err(expect(path.to_owned())));
    };
    check("/no/such", WorkingDirError::Absent);
    check("/etc/passwd", WorkingDirError::NotDirectory);
    check("etc", WorkingDirError::Relative);
}
