//! Creates trees of files with programs that every system has.

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

/// Runs a program. Returns whether it exists and succeeded.
pub fn run(program: &str, arguments: &[&str], directory: &Path) -> bool {
    match Command::new(program).args(arguments).current_dir(directory).output() {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            println!("{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
            false
        }
        Err(error) => {
            println!("{program}: {error}");
            false
        }
    }
}

/// Creates a root file system with all types of files that this user may create; one inode has three names. Returns
/// the missing types, and prints them.
pub fn rich_tree(root: &Path) -> Vec<&'static str> {
    fs::create_dir_all(root.join("usr/lib/deep/er")).unwrap();
    for directory in ["a", "empty", "etc"] {
        fs::create_dir(root.join(directory)).unwrap();
    }
    fs::write(root.join("usr/lib/\u{fc} odd = % name\n"), "odd").unwrap();
    let sizes =
        [0, 1, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, 70_000, (512 << 10) + 3, (1 << 20) + 3];
    for size in sizes {
        let bytes: Vec<u8> =
            (0..size).map(|at: u32| at.to_le_bytes()[0] ^ at.to_le_bytes()[1]).collect();
        fs::write(root.join(format!("usr/lib/{size}")), bytes).unwrap();
    }
    // A long path, which ustar cannot contain, and a long link target.
    let long = root.join("etc").join("l".repeat(200)).join("m".repeat(200));
    fs::create_dir(long.parent().unwrap()).unwrap();
    fs::write(long, "long").unwrap();
    symlink("t".repeat(300), root.join("etc/link")).unwrap();
    symlink("usr/lib", root.join("lib")).unwrap();
    // The name that a walk, and thus a tar, visits first is not the first one in the byte order of whole paths.
    fs::write(root.join("a/z"), vec![7; 100]).unwrap();
    fs::hard_link(root.join("a/z"), root.join("a-b")).unwrap();
    fs::hard_link(root.join("a/z"), root.join("usr/lib/deep/aa")).unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(3 << 20).unwrap();
    sparse.write_all_at(b"middle", 300_000).unwrap();
    fs::set_permissions(root.join("usr/lib/65"), fs::Permissions::from_mode(0o6711)).unwrap();
    fs::set_permissions(root.join("empty"), fs::Permissions::from_mode(0o1777)).unwrap();
    let mut missing = Vec::new();
    let mut need = |what, program, arguments: &[&str]| {
        if !run(program, arguments, root) {
            missing.push(what);
        }
    };
    // A version 2 capability (linux/capability.h, struct vfs_cap_data).
    let capability = "0x0100000200040000000000000000000000000000";
    need("named pipes", "mkfifo", &["pipe"]);
    need("user xattrs", "setfattr", &["-n", "user.a=b%", "-v", "0x00ff0a3d", "usr/lib/64"]);
    need("trusted xattrs", "setfattr", &["-n", "trusted.b", "-v", "t", "usr"]);
    let arguments = ["-n", "security.capability", "-v", capability, "usr/lib/513"];
    need("capabilities", "setfattr", &arguments);
    need("ACLs", "setfacl", &["-m", "u:12345:rw,g:34567:r", "usr/lib/512"]);
    need("default ACLs", "setfacl", &["-d", "-m", "u:12345:rwx", "usr/lib/deep"]);
    need("character devices", "mknod", &["null", "c", "1", "3"]);
    need("whiteouts", "mknod", &["whiteout", "c", "0", "0"]);
    need("block devices", "mknod", &["loop", "b", "7", "300"]);
    need("other owners", "chown", &["-h", "70000:3000000", "etc/link", "usr/lib/63"]);
    for (path, time) in [
        ("usr/lib/0", "@1500000000.123456789"),
        ("usr/lib/1", "@-1.5"),
        ("lib", "@1600000000.000000001"),
        ("usr/lib", "@1400000000.999999999"),
        (".", "@1300000000.5"),
    ] {
        assert!(run("touch", &["-h", "-d", time, path], root), "touch is part of every system");
    }
    if !missing.is_empty() {
        let missing = missing.join(", ");
        crate::skipped(&format!("trees with {missing}, which this user or system cannot make"));
    }
    missing
}
