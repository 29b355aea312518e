//! The same content is the same image, however it came. The trees are made by the kernel, the tars by GNU tar.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use super::Home;
use super::build::{Age, Layout, Pack, docker_archive, pack};
use super::oci::import::Options;

/// Runs a program; answers whether it is there and was content.
fn run(program: &str, arguments: &[&str], directory: &Path) -> bool {
    let output = Command::new(program).args(arguments).current_dir(directory).output();
    match output {
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

/// A root file system with all that this user may make. Answers what is missing in it.
fn rich_tree(root: &Path) -> Vec<&'static str> {
    fs::create_dir_all(root.join("usr/lib/deep/er")).unwrap();
    fs::create_dir_all(root.join("etc")).unwrap();
    fs::create_dir_all(root.join("empty")).unwrap();
    fs::write(root.join("usr/lib/\u{fc} name with spaces\n"), "odd").unwrap();
    for size in [0, 1, 63, 64, 65, 4095, 4096, 4097, 70_000, (512 << 10) + 3] {
        let bytes: Vec<u8> =
            (0..size).map(|at: u32| at.to_le_bytes()[0] ^ at.to_le_bytes()[1]).collect();
        fs::write(root.join(format!("usr/lib/{size}")), bytes).unwrap();
    }
    // A long path, which ustar can not hold, and a long target.
    let long = root.join("etc").join("l".repeat(200)).join("m".repeat(200));
    fs::create_dir_all(long.parent().unwrap()).unwrap();
    fs::write(long, "long").unwrap();
    symlink("t".repeat(300), root.join("etc/link")).unwrap();
    symlink("usr/lib", root.join("lib")).unwrap();
    // The first in byte order is not the first that a tar has.
    fs::write(root.join("usr/zz"), vec![7; 100]).unwrap();
    fs::hard_link(root.join("usr/zz"), root.join("usr/lib/deep/aa")).unwrap();
    fs::hard_link(root.join("usr/zz"), root.join("again")).unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(1 << 20).unwrap();
    sparse.write_all_at(b"middle", 300_000).unwrap();
    fs::set_permissions(root.join("usr/lib/65"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::set_permissions(root.join("empty"), fs::Permissions::from_mode(0o1777)).unwrap();
    let mut missing = Vec::new();
    let mut need = |what, done: bool| {
        if !done {
            missing.push(what);
        }
    };
    need("named pipes", run("mkfifo", &["pipe"], root));
    need("user xattrs", run("setfattr", &["-n", "user.a", "-v", "0x00ff0a3d", "usr/lib/64"], root));
    need("trusted xattrs", run("setfattr", &["-n", "trusted.b", "-v", "t", "etc"], root));
    let capability = "0x0100000200040000000000000000000000000000";
    let arguments = ["-n", "security.capability", "-v", capability, "usr/lib/4096"];
    need("capabilities", run("setfattr", &arguments, root));
    need("ACLs", run("setfacl", &["-m", "u:12345:rw,g:34567:r", "usr/lib/4097"], root));
    need("default ACLs", run("setfacl", &["-d", "-m", "u:12345:rwx", "usr/lib/deep"], root));
    need("character devices", run("mknod", &["null", "c", "1", "3"], root));
    need("whiteouts", run("mknod", &["whiteout", "c", "0", "0"], root));
    need("block devices", run("mknod", &["loop", "b", "7", "300"], root));
    need("other owners", run("chown", &["-h", "70000:3000000", "etc/link", "usr/lib/63"], root));
    for (path, time) in [
        ("usr/lib/0", "@1500000000.123456789"),
        ("usr/lib/1", "@-1.5"),
        ("lib", "@1600000000.000000001"),
        ("usr/lib", "@1400000000.999999999"),
        (".", "@1300000000.5"),
    ] {
        assert!(run("touch", &["-h", "-d", time, path], root), "touch is part of every system");
    }
    missing
}

fn tar(root: &Path, file: &Path, order: &str) -> bool {
    let file = file.to_str().unwrap();
    let arguments =
        ["--format=posix", "--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls", "-S"];
    let arguments = [&arguments[..], &[order, "-cf", file, "."]].concat();
    run("tar", &arguments, root)
}

#[test]
fn directory_tar_layout_archive_dump_and_image() {
    let home = Home::new();
    let root = home.path("root");
    let missing = rich_tree(&root);
    if !missing.is_empty() {
        println!(
            "SKIPPED: a tree with {}, which this user or system can not make",
            missing.join(", ")
        );
    }
    let [sorted, unsorted] = ["root.tar", "unsorted.tar"].map(|name| home.path(name));
    if !tar(&root, &sorted, "--sort=name") || !tar(&root, &unsorted, "--sort=none") {
        println!("SKIPPED: the tar, layout and archive of a directory: no GNU tar");
        return;
    }
    let directory = home.import("dir", "root").unwrap().image;
    let mut images = vec![("dir:", directory)];
    images.push(("tar:", home.import("tar", "root.tar").unwrap().image));
    images.push(("tar: in another order", home.import("tar", "unsorted.tar").unwrap().image));

    let bytes = fs::read(&sorted).unwrap();
    for how in [Pack::Plain, Pack::Gzip, Pack::Zstd] {
        let path = home.path("layout");
        let mut layout = Layout::new(&path);
        let (image, _) = layout.image(&[(bytes.clone(), how)]);
        layout.add(image, None, None);
        // A store of its own, so that it is read and not found.
        let other = Home::new();
        let text = format!("oci:{}", path.display());
        let source = super::Source::parse(text.as_ref()).unwrap();
        let report = super::oci::import::import(&other.store, &source, &other.options()).unwrap();
        assert!(!report.layers[0].is_reused);
        assert!(other.rebuilt(&report.layers[0].diff_id) == bytes);
        images.push(("oci:", report.image));
        // And once more, made from the recipe.
        let again = super::oci::import::import(&other.store, &source, &other.options()).unwrap();
        assert!(again.layers[0].is_reused);
        images.push(("a recipe", again.image));
    }
    let archive = docker_archive(&[bytes], &[], Age::Old);
    fs::write(home.path("a.tar"), pack(&archive, Pack::Gzip)).unwrap();
    let name = "some:name".parse().unwrap();
    let options = Options { name: Some(&name), ..home.options() };
    images.push((
        "docker-archive:",
        home.import_with("docker-archive", "a.tar", &options).unwrap().image,
    ));

    let mut file = fs::File::create(home.path("root.dump")).unwrap();
    file.write_all(home.dump(&directory).as_bytes()).unwrap();
    images.push(("dump:", home.import("dump", "root.dump").unwrap().image));
    let mut hasher = image::verity::Hasher::new(image::verity::Algorithm::Sha256);
    let profile = image::erofs::Profile::Composefs(options.versions);
    image::erofs::write(&home.tree(&directory), &profile, &mut hasher).unwrap();
    images.push(("its image", hasher.finish()));

    let expect = home.dump(&directory);
    for (source, image) in images {
        if image != directory {
            for (left, right) in expect.lines().zip(home.dump(&image).lines()) {
                assert_eq!(left, right, "{source}");
            }
            panic!("{source} is {image}, not {directory}");
        }
    }
}

/// A layer split in two has the tree of the whole: what is laid over is not seen.
#[test]
fn two_layers_and_one() {
    let home = Home::new();
    let root = home.path("root");
    rich_tree(&root);
    let whole = home.path("whole.tar");
    if !tar(&root, &whole, "--sort=name") {
        println!("SKIPPED: a directory's tar in two layers: no GNU tar");
        return;
    }
    let first = home.path("first");
    fs::create_dir_all(first.join("usr/lib/gone/deep")).unwrap();
    fs::create_dir_all(first.join("pipe/was/a/directory")).unwrap();
    fs::write(first.join("usr/lib/65"), "another").unwrap();
    fs::write(first.join("usr/lib/gone/deep/x"), "gone").unwrap();
    let lower = home.path("lower.tar");
    assert!(tar(&first, &lower, "--sort=none"));
    fs::write(root.join("usr/lib/.wh.gone"), "").unwrap();
    assert!(run("touch", &["-d", "@1400000000.999999999", "usr/lib"], &root));
    let upper = home.path("upper.tar");
    assert!(tar(&root, &upper, "--sort=none"));
    let path = home.path("layout");
    let mut layout = Layout::new(&path);
    let tars = [lower, upper].map(|tar| (fs::read(tar).unwrap(), Pack::Gzip));
    let (image, _) = layout.image(&tars);
    layout.add(image, None, None);
    let expect = home.import("tar", "whole.tar").unwrap().image;
    let layered = home.import("oci", "layout").unwrap();
    assert_eq!(home.dump(&layered.image), home.dump(&expect));
    assert_eq!(layered.image, expect);
    for (layer, (tar, _)) in layered.layers.iter().zip(&tars) {
        assert!(home.rebuilt(&layer.diff_id) == *tar);
    }
}
