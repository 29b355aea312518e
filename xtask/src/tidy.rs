//! Checks that the tree matches its documents and the style rules. The checks run with `cargo test`.

mod commands;
mod cycles;
mod dumps;
mod errors;
mod folders;
mod names;
mod plain_english;
mod sources;
mod threats;
mod user_identity;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use rig::process::repository;

/// Maximum number of packages in Cargo.lock. Each package is code that runs with the users' rights, so raise the
/// number deliberately. HTTP and TLS brought 115, half of them for systems that Quire is never built for. gRPC, which
/// engines use, brought 24. Varlink brought 22, of which those of zlink's other runtime are never built. The encryption
/// of private keys brought 10. Go's templates brought 2.
const MOST_PACKAGES: usize = 337;

/// Number of lines from which a file should be split, according to the style rules.
const MOST_LINES: usize = 700;

/// Longer files, each with the reason not to split it.
const LONG_FILES: [(&str, &str); 0] = [];

/// Text that belongs to one machine. It is written in halves, so that this file does not contain it.
const MACHINE: [(&str, &str); 7] = [
    ("/wor", "k/"),
    ("/root", "/."),
    ("/home", "/"),
    ("deb.debian", ".org"),
    ("snapshot.debian", ".org"),
    ("pkg.", "dev"),
    ("../sha", "red"),
];

/// Files that may contain one of `MACHINE`: the second half of the text, and the reason.
const MACHINE_EXCEPTIONS: [(&str, &str, &str); 2] = [
    (".ci/run", "red", "continuous integration puts the test data beside the clone"),
    (
        "xtask/podman-tests/images.sh",
        "/",
        "podman's tests look for files in this directory of their image",
    ),
];

/// The dependency table of ARCHITECTURE.md. A new edge is a decision: add it in both places.
const EDGES: [(&str, &[&str]); 10] = [
    ("quire-containerd-api", &[]),
    ("quire-image", &[]),
    ("quire-kernel", &[]),
    ("quire-store", &["quire-image", "quire-kernel"]),
    ("quire-oci", &["quire-image"]),
    ("quire-transfer", &["quire-image", "quire-oci", "quire-store"]),
    ("quire-container", &["quire-image", "quire-kernel", "quire-store"]),
    (
        "quire-serve",
        &[
            "quire-container",
            "quire-containerd-api",
            "quire-image",
            "quire-kernel",
            "quire-oci",
            "quire-store",
            "quire-transfer",
        ],
    ),
    (
        "quire-cli",
        &[
            "quire-container",
            "quire-image",
            "quire-kernel",
            "quire-oci",
            "quire-serve",
            "quire-store",
            "quire-transfer",
        ],
    ),
    ("quire-testing", &[]),
];

#[test]
fn crates_depend_only_downwards() {
    let mut cargo = Command::new(env!("CARGO"));
    let output = cargo.args(["metadata", "--no-deps", "--format-version=1"]).output().unwrap();
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut found = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let dependencies = package["dependencies"].as_array().unwrap().iter();
        let ours = dependencies.filter(|it| it["path"].is_string() && it["kind"].is_null());
        let mut ours: Vec<_> = ours.map(|it| it["name"].as_str().unwrap()).collect();
        ours.sort_unstable();
        found.insert(name, ours);
    }
    for name in ["quire-fuzz-targets", "rig", "xtask"] {
        found.remove(name);
    }
    let expected: BTreeMap<_, _> = EDGES.iter().map(|(name, to)| (*name, to.to_vec())).collect();
    assert_eq!(found, expected);
}

/// Crates that the initramfs tool must not link: TLS, an async runtime, HTTP, partition tables.
const NOT_IN_INITRAMFS: [&str; 8] =
    ["aws-lc-rs", "gpt", "hyper", "openssl", "reqwest", "ring", "rustls", "tokio"];

#[test]
fn the_initramfs_tool_is_small() {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["tree", "--offline", "--package", "quire-cli", "--no-default-features"]);
    cargo.args(["--edges", "normal", "--prefix", "none", "--format", "{p}"]);
    let output = cargo.current_dir(repository()).output().unwrap();
    assert!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).unwrap();
    let crates: BTreeSet<_> = tree.lines().filter_map(|it| it.split(' ').next()).collect();
    println!("quire without default features links {} crates", crates.len());
    let found: Vec<_> = NOT_IN_INITRAMFS.iter().filter(|it| crates.contains(**it)).collect();
    assert!(found.is_empty(), "it links {found:?}");
    assert!(crates.contains("quire-transfer"), "{tree}");
}

pub(crate) fn tracked() -> Vec<String> {
    let mut git = Command::new("git");
    let output = git.args(["ls-files"]).current_dir(repository()).output().unwrap();
    assert!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(String::from).collect()
}

/// Returns a tracked file's text; `None` for binary files and for files that are being deleted.
fn text(path: &str) -> Option<String> {
    String::from_utf8(fs::read(repository().join(path)).ok()?).ok()
}

#[test]
fn nothing_names_a_machine() {
    let mut found = Vec::new();
    for path in tracked() {
        for (number, line) in text(&path).unwrap_or_default().lines().enumerate() {
            for (first, second) in MACHINE {
                let excepted = MACHINE_EXCEPTIONS.iter().any(|it| (it.0, it.1) == (&path, second));
                if line.contains(&[first, second].concat()) && !excepted {
                    found.push(format!("{path}:{}: {line}", number + 1));
                }
            }
        }
    }
    assert_eq!(found, Vec::<String>::new());
}

/// First line of generated files, which `cargo xtask oracle messages` makes.
pub(crate) const GENERATED: &str = "// This file is @generated by prost-build.";

#[test]
fn files_are_short_enough_to_read() {
    let sources = tracked().into_iter().filter(|path| path.ends_with(".rs"));
    let is_long = |text: &str| !text.starts_with(GENERATED) && text.lines().count() > MOST_LINES;
    let long = sources.filter(|path| is_long(&text(path).unwrap_or_default()));
    let long: Vec<_> = long.collect();
    let listed: Vec<_> = LONG_FILES.iter().map(|(path, _)| String::from(*path)).collect();
    assert_eq!(long, listed);
}

/// A file that is a module of two programs is compiled twice, and is partly unused in each.
#[test]
fn modules_are_where_their_names_say() {
    let attribute = ["#[pa", "th = "].concat();
    let sources = tracked().into_iter().filter(|path| path.ends_with(".rs"));
    let found = sources.filter(|path| text(path).unwrap_or_default().contains(&attribute));
    assert_eq!(found.collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
fn documents_have_lines_that_fit() {
    const COLUMNS: usize = 120;
    let mut long = Vec::new();
    for path in tracked().into_iter().filter(|path| path.ends_with(".md")) {
        // Benches write these pages.
        if path.starts_with("docs/performance/") && !path.ends_with("README.md") {
            continue;
        }
        let mut is_code = false;
        for (number, line) in text(&path).unwrap_or_default().lines().enumerate() {
            is_code ^= line.trim_start().starts_with("```");
            let is_table = line.trim_start().starts_with('|');
            if !is_code && !is_table && line.chars().count() > COLUMNS {
                long.push(format!("{path}:{}", number + 1));
            }
        }
    }
    assert_eq!(long, Vec::<String>::new());
}

#[test]
fn the_lock_file_stays_small() {
    let lock = text("Cargo.lock").unwrap();
    let packages = lock.lines().filter(|line| *line == "[[package]]").count();
    assert!(packages <= MOST_PACKAGES, "{packages} packages in Cargo.lock");
}

/// An integer that wraps in a reader of untrusted bytes must end the program, also in releases.
#[test]
fn releases_check_for_overflow() {
    let manifest = text("Cargo.toml").unwrap();
    let release = manifest.split("\n[").find_map(|it| it.strip_prefix("profile.release]"));
    let checked = release.unwrap().lines().any(|line| line == "overflow-checks = true");
    assert!(checked, "[profile.release] has no overflow-checks");
    let off = manifest.lines().filter(|line| line.replace(' ', "") == "overflow-checks=false");
    assert_eq!(off.count(), 0, "a profile turns overflow-checks off");
}

/// All packages, including those of separate workspaces, have the same keywords and categories.
#[test]
fn every_package_has_keywords() {
    let root = text("Cargo.toml").unwrap();
    let lines = |text: &str| {
        let lines = text
            .lines()
            .filter(|it| ["keywords", "categories"].iter().any(|key| it.starts_with(key)));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let common = lines(&root);
    assert_eq!(common.len(), 2, "{common:?}");
    let inherited = ["keywords.workspace = true", "categories.workspace = true"];
    let manifests = tracked().into_iter().filter(|it| it.ends_with("/Cargo.toml"));
    let mut count = 0;
    for path in manifests {
        let found = lines(&text(&path).unwrap());
        assert!(found == common || found == inherited, "{path}: {found:?}");
        count += 1;
    }
    assert!(count > 10, "{count}");
}

#[test]
fn every_crate_takes_the_lints_and_only_kernel_is_unsafe() {
    for entry in fs::read_dir(repository().join("crates")).unwrap() {
        let dir = entry.unwrap().path();
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        let manifest = fs::read_to_string(dir.join("Cargo.toml")).unwrap();
        assert!(manifest.contains("[lints]\nworkspace = true"), "{name} does not take the lints");
        let roots = ["src/lib.rs", "src/main.rs"].map(|it| fs::read_to_string(dir.join(it)));
        for root in roots.into_iter().flatten() {
            let forbids = root.contains("#![forbid(unsafe_code)]");
            assert_eq!(forbids, name != "kernel", "forbid(unsafe_code) in {name}");
        }
    }
}

/// Programs of every Debian system with a compiler, which tests may call without a check.
const EVERYWHERE: &str = "chmod chown cp echo env find fincore install ldd losetup mkfifo mkfs.ext4 e2fsck mknod mount nsenter \
    script setpriv setsid sh sha256sum sleep tar umount unshare";

/// A test that calls another program must get it from `testing`, which skips the test with that program's name if it
/// is missing.
#[test]
fn tests_ask_for_the_programs_that_they_call() {
    let everywhere: BTreeSet<_> = EVERYWHERE.split_whitespace().collect();
    let mut found = Vec::new();
    for path in tracked() {
        // A build script is no test, and does without the programs that are missing.
        let is_other = path.starts_with("crates/testing/") || path == "crates/cli/build.rs";
        if !path.starts_with("crates/") || is_other {
            continue;
        }
        let text = text(&path).unwrap_or_default();
        if path.ends_with(".rs") && text.contains(concat!("ln!(\"SKIPPED", ": ")) {
            found.push(format!("{path} says itself that a test is skipped"));
        }
        // Code outside of tests calls only programs that it has found.
        for call in text.split(concat!("Command::new", "(\"")).skip(1) {
            let program = call.split('"').next().unwrap_or_default();
            if !everywhere.contains(program) && !program.starts_with('/') {
                found.push(format!("{path} calls {program}"));
            }
        }
    }
    assert_eq!(found, Vec::<String>::new());
}

/// Returns the modules of the sources, as `crate::module`, and for directory modules as `crate::module::part`.
fn modules() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for path in tracked() {
        let parts: Vec<_> = path.trim_end_matches(".rs").split('/').collect();
        if let ["crates", name, "src", inner @ ..] = &parts[..]
            && path.ends_with(".rs")
        {
            let inner: Vec<_> = inner.iter().filter(|it| **it != "mod").copied().collect();
            let is_test = inner.contains(&"tests");
            // Every module of this crate is generated.
            if *name == "containerd-api" {
                continue;
            }
            if !matches!(inner[..], ["lib" | "main"]) && !is_test && inner.len() <= 2 {
                names.insert([&[*name], &inner[..]].concat().join("::"));
            }
        }
    }
    names
}

/// Returns the paths in backquotes that begin with the name of a crate.
fn named_modules(text: &str, crates: &BTreeSet<String>) -> BTreeSet<String> {
    let quoted = text.split('`').skip(1).step_by(2).map(|it| it.trim_end_matches("()"));
    let paths =
        quoted.filter(|it| it.split_once("::").is_some_and(|(name, _)| crates.contains(name)));
    // Only modules are lower case. Functions look the same as parts of modules, so the caller must distinguish them.
    paths.map(String::from).collect()
}

#[test]
fn architecture_names_the_modules_there_are() {
    let Some(architecture) = text("ARCHITECTURE.md") else {
        println!("SKIPPED: ARCHITECTURE.md is not there");
        return;
    };
    let there = modules();
    let crates: BTreeSet<_> =
        there.iter().filter_map(|it| it.split("::").next()).map(String::from).collect();
    for name in &crates {
        assert!(
            architecture.contains(&format!("`{name}`")),
            "ARCHITECTURE.md lacks the crate {name}"
        );
    }
    let named = named_modules(&architecture, &crates);
    let top = |names: &BTreeSet<String>| -> BTreeSet<String> {
        let firsts = names.iter().map(|it| it.split("::").take(2).collect::<Vec<_>>().join("::"));
        firsts.collect()
    };
    assert_eq!(top(&named), top(&there), "left: what ARCHITECTURE.md names; right: the sources");
}

#[test]
fn module_names_are_found_in_backquotes() {
    let crates = BTreeSet::from([String::from("image"), String::from("store")]);
    let text =
        "`image::tree` and `store::object`, `std::fs`, image::no, `image`, `image::erofs::write()`";
    let named: Vec<_> = named_modules(text, &crates).into_iter().collect();
    assert_eq!(named, ["image::erofs::write", "image::tree", "store::object"]);
}

#[test]
fn the_makefile_is_a_front_door() {
    let makefile = text("Makefile").unwrap();
    let recipes = makefile.lines().filter_map(|line| line.split_once(": "));
    let recipes = recipes.filter(|(_, rest)| rest.trim_start().starts_with(';')).count();
    let others: Vec<_> = makefile.lines().filter(|line| line.starts_with('\t')).collect();
    assert!(recipes <= 12, "{recipes} targets");
    assert_eq!(others, Vec::<&str>::new(), "recipes of several lines belong into xtask");
}

#[test]
fn performance_tables_stand_beside_their_numbers() {
    let all = tracked();
    let in_folder = |end: &str| -> BTreeSet<String> {
        let paths =
            all.iter().filter_map(|it| it.strip_prefix("docs/performance/")?.strip_suffix(end));
        paths.filter(|it| !["README", "figures"].contains(it)).map(String::from).collect()
    };
    assert_eq!(in_folder(".md"), in_folder(".json"));
}

#[test]
fn the_picture_of_the_readme_and_the_page_of_figures_show_the_recorded_figures() {
    let dir = repository().join("docs/performance");
    let is_written = |name: &str, text: String| {
        assert!(
            fs::read_to_string(dir.join(name)).unwrap() == text,
            "`cargo xtask bench figures` makes docs/performance/{name} again"
        );
    };
    is_written(rig::figures::OVERVIEW, rig::figures::overview(&dir).unwrap());
    is_written(rig::figures::PAGE, rig::figures::page(&dir).unwrap());
}
