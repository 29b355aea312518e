//! Tests which files the start of an image needs.

use std::collections::BTreeSet;

use image::lazy::hot::BLOCK;
use oci::source::{Choice, ImageSource};
use quire_transfer::import::{ImportOptions, import};
use quire_transfer::lazy::{StartCommand, closure};
use store::Form;

use crate::build::{Layout, Pack, Tar};
use crate::home::{Home, usual_wishes};

/// Size of each file: enough for a block that has bytes of no other file.
const SIZE: usize = 3 << 14;

/// An ELF file for tests.
#[derive(Clone, Copy)]
struct Elf<'a> {
    is_wide: bool,
    is_little: bool,
    machine: u16,
    loader: &'a str,
    needed: &'a [&'a str],
    runpath: &'a str,
    rpath: &'a str,
}

const X86_64: Elf<'static> = Elf {
    is_wide: true,
    is_little: true,
    machine: 62,
    loader: "",
    needed: &[],
    runpath: "",
    rpath: "",
};
const I386: Elf<'static> = Elf { is_wide: false, machine: 3, ..X86_64 };
const S390X: Elf<'static> = Elf { is_little: false, machine: 22, ..X86_64 };

impl Elf<'_> {
    /// Returns a file with one segment. Source: elf(5).
    fn bytes(&self) -> Vec<u8> {
        let number = |value: u64, wide: bool, bytes: &mut Vec<u8>| match (wide, self.is_little) {
            (true, true) => bytes.extend(value.to_le_bytes()),
            (true, false) => bytes.extend(value.to_be_bytes()),
            (false, true) => bytes.extend(u32::try_from(value).unwrap().to_le_bytes()),
            (false, false) => bytes.extend(u32::try_from(value).unwrap().to_be_bytes()),
        };
        let word = |value: u64, bytes: &mut Vec<u8>| number(value, self.is_wide, bytes);
        let four = |value: u32, bytes: &mut Vec<u8>| number(value.into(), false, bytes);
        let two = |value: u16, bytes: &mut Vec<u8>| match self.is_little {
            true => bytes.extend(value.to_le_bytes()),
            false => bytes.extend(value.to_be_bytes()),
        };
        // The addresses of the segment begin here.
        let base = 0x40_0000;
        let (loader, strings, dynamic) = (0x400, 0x800, 0xc00);
        let mut names = vec![0];
        let mut entries = Vec::new();
        for (tag, name) in
            self.needed.iter().map(|it| (1, *it)).chain([(29, self.runpath), (15, self.rpath)])
        {
            if !name.is_empty() {
                entries.push((tag, names.len() as u64));
                names.extend(name.as_bytes());
                names.push(0);
            }
        }
        entries.extend([(5, base + strings), (10, names.len() as u64), (0, 0)]);
        let mut section = Vec::new();
        for (tag, value) in &entries {
            word(*tag, &mut section);
            word(*value, &mut section);
        }
        let mut file = b"\x7fELF".to_vec();
        file.extend([1 + u8::from(self.is_wide), 2 - u8::from(self.is_little), 1, 0]);
        file.extend([0; 8]);
        two(2, &mut file);
        two(self.machine, &mut file);
        four(1, &mut file);
        let header = if self.is_wide { 64 } else { 52 };
        for value in [base, u64::from(header), 0] {
            word(value, &mut file);
        }
        four(0, &mut file);
        let of_program = if self.is_wide { 56 } else { 32 };
        for value in [header, of_program, 3, 0, 0, 0] {
            two(value, &mut file);
        }
        let interpreter = self.loader.len() as u64 + 1;
        for (kind, start, length) in [
            (1, 0, SIZE as u64),
            (if self.loader.is_empty() { 4 } else { 3 }, loader, interpreter),
            (2, dynamic, section.len() as u64),
        ] {
            four(kind, &mut file);
            if self.is_wide {
                four(5, &mut file);
            }
            for value in [start, base + start, base + start, length, length] {
                word(value, &mut file);
            }
            if !self.is_wide {
                four(5, &mut file);
            }
            word(4096, &mut file);
        }
        file.resize(SIZE, 0);
        let mut put = |at: u64, bytes: &[u8]| {
            let at = usize::try_from(at).unwrap();
            file[at..at + bytes.len()].copy_from_slice(bytes);
        };
        put(loader, self.loader.as_bytes());
        put(strings, &names);
        put(dynamic, &section);
        file
    }
}

/// Makes a file unique, so that it can be found in the tar.
fn marked(mut bytes: Vec<u8>, name: &str) -> Vec<u8> {
    let mark = format!("<{name}>");
    let length = bytes.len();
    bytes[length - mark.len()..].copy_from_slice(mark.as_bytes());
    bytes
}

/// An image that has the files of the list, each with the name that it has there.
struct Files {
    tar: Tar,
    names: Vec<String>,
}

impl Files {
    fn new(text: &str) -> Self {
        Self { tar: Tar::from_text(text), names: Vec::new() }
    }

    fn program(mut self, path: &str, bytes: Vec<u8>) -> Self {
        self.tar = self.tar.program(path, &marked(bytes, path));
        self.names.push(path.to_owned());
        self
    }

    fn file(mut self, path: &str, bytes: Vec<u8>) -> Self {
        self.tar = self.tar.file(path, &marked(bytes, path));
        self.names.push(path.to_owned());
        self
    }

    /// Returns the names of the files whose last block is in the closure.
    fn closure(&self, words: &[&str], env: &[&str], directory: &str) -> BTreeSet<String> {
        let home = Home::new();
        let path = home.path("layout");
        let mut layout = Layout::new(&path);
        let tar = self.tar.bytes();
        let (descriptor, _) = layout.image(&[(tar.clone(), Pack::Gzip)]);
        layout.add(descriptor, Some("one"), None);
        let source = ImageSource::Layout { directory: path.clone(), choice: Choice::Only };
        let options = ImportOptions { form: Form::Tar, ..usual_wishes() };
        let report = import(&home.store, &source, &home.environment(), &options).unwrap();
        let open = home.store.open_image(&report.image).unwrap();
        let own = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
        let (words, env) = (own(words), own(env));
        let start = StartCommand { words: &words, env: &env, directory };
        let runs = closure(&open, &start).unwrap();
        let blocks: Vec<u64> =
            runs.iter().flat_map(|it| it.block..it.block + it.blocks).map(u64::from).collect();
        let unique: BTreeSet<u64> = blocks.iter().copied().collect();
        assert_eq!(blocks.len(), unique.len(), "a block occurs twice");
        let is_in = |name: &&String| {
            let mark = format!("<{name}>");
            let at = tar.windows(mark.len()).position(|it| it == mark.as_bytes()).unwrap();
            // The block before has no bytes of other files.
            unique.contains(&(at as u64 / BLOCK - 1))
        };
        self.names.iter().filter(is_in).cloned().collect()
    }
}

fn names(all: &[&str]) -> BTreeSet<String> {
    all.iter().map(ToString::to_string).collect()
}

#[test]
fn libraries_are_found_as_by_the_loader() {
    let program = Elf {
        loader: "/lib64/ld.so",
        needed: &["libone.so.1", "libtwo.so", "libnone.so", "/opt/direct.so"],
        runpath: "$ORIGIN/../lib:/loop",
        ..X86_64
    };
    let one = Elf { needed: &["libthree.so", "libone.so.1"], ..X86_64 };
    let text = "d bin,d opt,d opt/bin,d opt/lib,d lib64,d usr,d usr/lib,d usr/lib/x86_64-linux-gnu,d etc,\
                d etc/ld.so.conf.d,d vendor,d path,s bin/app ../opt/bin/app,s opt/lib/libone.so.1 libone.so.1.2,\
                s loop loop,s lib usr/lib,s lib64/ld.so ../../../usr/lib/real.so,f etc/ld.so.conf.d/v.conf /vendor";
    let files = Files::new(text)
        .program("opt/bin/app", program.bytes())
        .file("opt/lib/libone.so.1.2", one.bytes())
        .file("usr/lib/real.so", X86_64.bytes())
        // Libraries for other machines are skipped.
        .file("usr/lib/libtwo.so", I386.bytes())
        .file("opt/lib/libtwo.so", S390X.bytes())
        .file("usr/lib/x86_64-linux-gnu/libtwo.so", X86_64.bytes())
        .file("vendor/libthree.so", X86_64.bytes())
        .file("path/libthree.so", X86_64.bytes())
        .file("opt/direct.so", X86_64.bytes())
        .file("usr/lib/libother.so", X86_64.bytes())
        .file("etc/ld.so.cache", vec![0; SIZE])
        .program("bin/other", X86_64.bytes());
    let always = [
        "opt/bin/app",
        "opt/lib/libone.so.1.2",
        "usr/lib/real.so",
        "usr/lib/x86_64-linux-gnu/libtwo.so",
        "opt/direct.so",
        "etc/ld.so.cache",
    ];
    let with = |one: &'static str| names(&[&always[..], &[one]].concat());
    assert_eq!(
        files.closure(&["app", "--option"], &["PATH=/none:/bin"], ""),
        with("vendor/libthree.so")
    );
    let env = ["PATH=/bin", "LD_LIBRARY_PATH=/none:/path"];
    assert_eq!(files.closure(&["/bin/app"], &env, ""), with("path/libthree.so"));
    assert_eq!(files.closure(&["bin/app", "some text"], &[], "/opt"), with("vendor/libthree.so"));
    // A command that is not in the image, one that leads nowhere, a directory, and no command.
    for words in [&["none"][..], &["/loop"], &["/opt"], &["none", "app"], &[""], &[]] {
        assert_eq!(files.closure(words, &["PATH=/bin"], ""), names(&[]), "{words:?}");
    }
}

/// Source: ld.so(8): `DT_RPATH` before `LD_LIBRARY_PATH` before `DT_RUNPATH`, and the first is ignored beside the last.
#[test]
fn search_paths_have_the_order_of_the_loader() {
    let library = "lib.so";
    let program = Elf { loader: "/bin/ld", needed: &[library, "deep.so"], ..X86_64 };
    let deep = Elf { needed: &["inner.so"], ..X86_64 };
    let check = |runpath: &str, rpath: &str, env: &[&str], expect: &[&str]| {
        let files = Files::new("d bin,d env,d run,d old,d usr,d usr/lib")
            .program("bin/app", Elf { runpath, rpath, ..program }.bytes())
            .file("bin/ld", X86_64.bytes())
            .file("env/lib.so", X86_64.bytes())
            .file("run/lib.so", X86_64.bytes())
            .file("old/lib.so", X86_64.bytes())
            .file("usr/lib/deep.so", deep.bytes())
            .file("old/inner.so", X86_64.bytes())
            .file("usr/lib/inner.so", X86_64.bytes())
            .file("usr/lib/lib.so", X86_64.bytes());
        let all = [&["bin/app", "bin/ld", "usr/lib/deep.so"], expect].concat();
        assert_eq!(files.closure(&["app"], env, "/"), names(&all), "{runpath} {rpath} {env:?}");
    };
    let env = ["LD_LIBRARY_PATH=/env"];
    check("/run", "", &env, &["env/lib.so", "usr/lib/inner.so"]);
    check("/run", "", &[], &["run/lib.so", "usr/lib/inner.so"]);
    // Libraries inherit the older kind of path.
    check("", "/old", &env, &["old/lib.so", "old/inner.so"]);
    check("/run", "/old", &env, &["env/lib.so", "usr/lib/inner.so"]);
    check("/run", "/old", &[], &["run/lib.so", "usr/lib/inner.so"]);
    check("", "", &[], &["usr/lib/lib.so", "usr/lib/inner.so"]);
}

/// Images are hostile, so all lists have limits.
#[test]
fn long_lists_are_cut() {
    let program = Elf { loader: "/bin/ld", needed: &["near.so", "far.so"], ..X86_64 };
    let lines = |first: usize, count: usize| -> String {
        (first..first + count).map(|it| format!("/none/{it}\n/none/{it}\n")).collect()
    };
    let conf = format!("{}/near\n{}/far\n{:99}", lines(0, 255), lines(255, 1), "");
    let files = Files::new("d bin,d etc,d near,d far")
        .program("bin/app", program.bytes())
        .file("bin/ld", X86_64.bytes())
        .file("etc/ld.so.conf", conf.into_bytes())
        .file("near/near.so", X86_64.bytes())
        .file("far/far.so", X86_64.bytes())
        .program("bin/last", X86_64.bytes());
    let words: Vec<&str> = std::iter::once("app").chain(["none"; 16]).chain(["last"]).collect();
    let found = files.closure(&words, &[], "/");
    assert!(!found.contains("far/far.so") && !found.contains("bin/last"), "{found:?}");
    assert!(found.contains("near/near.so") && found.contains("bin/app"), "{found:?}");
    assert!(files.closure(&words[1..], &[], "/").is_empty());
    assert!(files.closure(&["app", "last"], &[], "/").contains("bin/last"));
    // Too many lookups find nothing more.
    let path = format!("PATH={}/bin", "/bin/../bin/../bin/..:".repeat(63));
    assert!(files.closure(&["last"], &[&path], "/").contains("bin/last"));
    let long = format!("PATH={}:/bin", "/bin/..".repeat(125_000));
    assert!(files.closure(&["last"], &[&long], "/").is_empty());
}

#[test]
fn scripts_need_their_interpreters() {
    let script = |line: &str| {
        let mut bytes = line.as_bytes().to_vec();
        bytes.resize(SIZE, b'\n');
        bytes
    };
    let files = Files::new("d bin,d usr,d usr/bin")
        .program("bin/entry", script("#! /bin/sh -e\nexec \"$@\"\n"))
        .program("bin/sh", X86_64.bytes())
        .program("usr/bin/env", I386.bytes())
        .program("bin/python", S390X.bytes())
        .program("bin/tool", script("#!/usr/bin/env -S A=b python -u\n"))
        .program("bin/self", script("#!/bin/self\n"))
        .file("bin/data", vec![1; SIZE]);
    let check = |words: &[&str], expect: &[&str]| {
        assert_eq!(files.closure(words, &[], "/"), names(expect), "{words:?}");
    };
    // The entrypoint executes its arguments. A file that cannot be executed is none of them.
    check(
        &["entry", "tool", "data"],
        &["bin/entry", "bin/sh", "bin/tool", "usr/bin/env", "bin/python"],
    );
    check(&["self"], &["bin/self"]);
    // A shell executes a text.
    check(&["sh", "-c", "exec python app.py"], &["bin/sh", "bin/python"]);
    check(&["sh", "-c", "A=b python app.py"], &["bin/sh"]);
    check(&["data"], &[]);
}

/// Headers in images are hostile. A damaged program has perhaps no libraries, but it is a file of the start.
#[test]
fn damaged_programs_do_no_harm() {
    let program = Elf { loader: "/bin/ld", needed: &["a", "b"], runpath: "/bin", ..X86_64 }.bytes();
    let mut text = String::from("d bin");
    let mut files = Vec::new();
    for at in (4..64 + 3 * 56).chain(0xc00..0xc60) {
        let mut bytes = program.clone();
        bytes[at] = 0xff;
        files.push((format!("bin/p{at}"), bytes));
    }
    for (name, length) in [("cut", 40), ("short", 100), ("tiny", 5)] {
        files.push((format!("bin/{name}"), program[..length].to_vec()));
    }
    text += ",f bin/empty";
    let mut tar = Tar::from_text(&text);
    for (name, bytes) in &files {
        tar = tar.program(name, bytes);
    }
    let words: Vec<&str> = files.iter().map(|it| &it.0[4..]).collect();
    let found = Files { tar, names: Vec::new() }.closure(&words, &[], "/");
    assert_eq!(found, names(&[]));
}

#[test]
fn programs_of_other_classes_and_byte_orders_are_read() {
    for machine in [I386, S390X] {
        let program = Elf { loader: "/bin/ld", needed: &["lib.so"], ..machine };
        let files = Files::new("d bin,d lib,d usr,d usr/lib")
            .program("bin/app", program.bytes())
            .file("bin/ld", machine.bytes())
            .file("lib/lib.so", X86_64.bytes())
            .file("usr/lib/lib.so", machine.bytes());
        let found = files.closure(&["app"], &[], "/");
        assert_eq!(found, names(&["bin/app", "bin/ld", "usr/lib/lib.so"]));
    }
}
