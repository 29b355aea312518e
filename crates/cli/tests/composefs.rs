//! The replacements for composefs's tools, called by name, as a user calls them.
//!
//! The expected exit codes and outputs are those of composefs 1.0.8, tried by hand. The image digests come from
//! composefs's own tests or from an independent writer. If that version is available, images and verdicts are also
//! compared with it, byte for byte.

#![expect(clippy::unwrap_used, reason = "helpers of tests, which clippy takes for more")]

use std::ffi::OsString;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use sha2::{Digest as _, Sha256};

const ROOT: &str = "/ 4096 40755 2 0 0 0 0.0 - - -\n";
/// The fs-verity digest of the image of `ROOT`.
const ROOT_DIGEST: &str = "8f589e8f57ecb88823736b0d857ddca1e1068a23e264fad164b28f7038eb3682";
const ROOT_SHA256: &str = "c3dc5b0fc4afb0693a95e017fe5815e1f88f204d485df617541b5ea659aefb8b";
/// The fs-verity digest of 100 zero bytes.
const ZEROS: &str = "b0fb44a8078cc2d7d91ede6d16dfe63943613e6286bd7c49efd0223940d51229";

/// Runs a program in a directory with these bytes as standard input.
fn run_command(mut command: Command, directory: &Path, input: &[u8]) -> Output {
    command.current_dir(directory).env_remove("CFS_PARSE_STRICT");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let feeder = std::thread::spawn(move || {
        // A program that needs no more input may close the pipe.
        stdin.write_all(&input).ok();
    });
    let output = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    output
}

/// Returns a command for Quire under another name.
fn ours(tool: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
    command.arg0(format!("/usr/bin/{tool}"));
    command
}

fn run(directory: &Path, words: &str, input: &[u8]) -> Output {
    let mut words = words.split(' ').filter(|word| !word.is_empty());
    let mut command = ours(words.next().unwrap());
    command.args(words);
    run_command(command, directory, input)
}

/// Runs a tool and expects its code, its whole standard output and a part of its standard error.
fn check(directory: &Path, words: &str, input: &str, code: i32, stdout: &str, stderr: &str) {
    let output = run(directory, words, input.as_bytes());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{words}: {errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), stdout, "{words}");
    assert!(errors.contains(stderr), "{words}: {errors}");
    assert_eq!(errors.is_empty(), stderr.is_empty(), "{words}: {errors}");
}

fn sha256(path: &Path) -> String {
    let digest = Sha256::digest(fs::read(path).unwrap());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn arguments_of_mkcomposefs() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    fs::create_dir(at.join("d")).unwrap();
    fs::write(at.join("file"), "").unwrap();
    symlink("d", at.join("link")).unwrap();
    let refused = |words: &str, why: &str| {
        check(at, &format!("mkcomposefs {words}"), "", 1, "", why);
        assert!(!at.join("i").exists(), "{words}: the image was left behind");
    };
    refused("", "No source path specified");
    refused("d", "No destination path specified");
    refused("--print-digest d", "No destination path specified");
    refused("d i x", "Too many arguments");
    refused("--print-digest-only d i", "Cannot specify destination path");
    refused("--nonsense d i", "unrecognized option '--nonsense'\nUsage: mkcomposefs [OPTIONS]");
    refused("--help", "unrecognized option '--help'\nUsage: ");
    refused("--digest-store", "requires an argument");
    refused("--skip d i", "ambiguous");
    refused("--skip-xattrs --user-xattrs d i", "exclude each other");
    refused("--threads=0 d i", "Invalid threads count 0");
    refused("--min-version=x d i", "Invalid min version x");
    refused("--min-version=2 d i", "unknown format version 2");
    refused("nope i", "error accessing nope: No such file");
    refused("file i", "error accessing file: Not a directory");
    refused("link i", "error accessing link: Not a directory");
    refused("d nope/i", "failed to open output file nope/i");
    refused("--from-file nope i", "open `nope`: No such file");
    refused("--from-file d i", "cannot read line 1 of the dump: Is a directory");
    refused("--from-file - i", "the dump is empty");
    refused("--from-file file i", "the dump is empty");
}

#[test]
fn an_image_from_a_dump() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    fs::write(at.join("dump"), ROOT).unwrap();
    let digest = format!("{ROOT_DIGEST}\n");
    check(at, "mkcomposefs --from-file --print-digest-only dump", "", 0, &digest, "");
    check(at, "mkcomposefs --from-file --print-digest - i", ROOT, 0, &digest, "");
    assert_eq!(sha256(&at.join("i")), ROOT_SHA256);
    check(at, "mkcomposefs dump --from-f -- i2", "", 0, "", "");
    assert_eq!(sha256(&at.join("i2")), ROOT_SHA256);
    // The old contents of the file are replaced.
    fs::write(at.join("i3"), [1; 100_000]).unwrap();
    check(at, "mkcomposefs --from-file dump i3", "", 0, "", "");
    assert_eq!(sha256(&at.join("i3")), ROOT_SHA256);
    let output = run(at, "mkcomposefs --from-file dump - --print-digest", b"");
    let (image, printed) = output.stdout.split_at(16384);
    assert_eq!(image, fs::read(at.join("i")).unwrap());
    assert_eq!(printed, digest.as_bytes());
    let output = run(at, "composefs-info measure-file i", b"");
    assert_eq!(output.stdout, digest.as_bytes());
}

#[test]
fn a_wrong_line_is_named_and_leaves_no_new_image() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let wrong = format!("{ROOT}/f 0 644 1 0 0 0 0.0 - - -\n");
    let why = "mkcomposefs: line 2 of the dump is invalid: mode 644 has no file type\n";
    check(at, "mkcomposefs --from-file - i", &wrong, 1, "", why);
    assert!(!at.join("i").exists());
    fs::write(at.join("i"), "mine").unwrap();
    check(at, "mkcomposefs --from-file - i", &wrong, 1, "", why);
    assert!(at.join("i").exists(), "what was there is not ours to remove");

    let newline = ROOT.trim_end();
    check(at, "mkcomposefs --from-file - i", newline, 0, "", "");
    // `run_command` removes the variable, so that the environment of the test does not matter.
    let mut command = Command::new("env");
    command.args(["CFS_PARSE_STRICT=", env!("CARGO_BIN_EXE_quire"), "composefs", "mkcomposefs"]);
    command.args(["--from-file", "-", "i"]);
    let output = run_command(command, at, newline.as_bytes());
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("does not end with a newline"));
}

/// Makes a directory of which all metadata that goes into an image is known.
fn sample(at: &Path) -> PathBuf {
    let root = at.join("d");
    fs::create_dir_all(root.join("sub")).unwrap();
    fs::write(root.join("small"), "hi\n").unwrap();
    fs::write(root.join("sub/zeros"), [0; 100]).unwrap();
    fs::write(root.join("same"), [0; 100]).unwrap();
    fs::write(root.join("secret"), [1; 5000]).unwrap();
    symlink("nowhere", root.join("link")).unwrap();
    let modes = [
        ("", 0o755),
        ("sub", 0o700),
        ("small", 0o644),
        ("same", 0o604),
        ("sub/zeros", 0o755),
        ("secret", 0o400),
    ];
    for (name, mode) in modes {
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    root
}

#[test]
fn an_image_from_a_directory() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let root = sample(at);
    check(at, "mkcomposefs --use-epoch --skip-xattrs d i", "", 0, "", "");
    let path = format!("{}/{}", &ZEROS[..2], &ZEROS[2..]);
    let owner = fs::metadata(&root).map(|it| {
        use std::os::unix::fs::MetadataExt as _;
        format!("{} {}", it.uid(), it.gid())
    });
    let owner = owner.unwrap();
    let secret = String::from_utf8(run(at, "composefs-info measure-file d/secret", b"").stdout);
    let secret = secret.unwrap().trim_end().to_owned();
    let secret_path = format!("{}/{}", &secret[..2], &secret[2..]);
    let dump = format!(
        "/ 4096 40755 3 {owner} 0 0.0 - - -\n\
         /link 7 120777 1 {owner} 0 0.0 nowhere - -\n\
         /same 100 100604 1 {owner} 0 0.0 {path} - {ZEROS}\n\
         /secret 5000 100400 1 {owner} 0 0.0 {secret_path} - {secret}\n\
         /small 3 100644 1 {owner} 0 0.0 - hi\\n -\n\
         /sub 44 40700 2 {owner} 0 0.0 - - -\n\
         /sub/zeros 100 100755 1 {owner} 0 0.0 {path} - {ZEROS}\n"
    );
    check(at, "composefs-info dump i", "", 0, &dump, "");
    check(at, "mkcomposefs --from-file - again", &dump, 0, "", "");
    assert_eq!(fs::read(at.join("again")).unwrap(), fs::read(at.join("i")).unwrap());

    let listing = format!(
        "/link\t-> nowhere\n/same\t@ {path}\n/secret\t@ {secret_path}\n/small\n/sub/\t\n/sub/zeros\t@ {path}\n"
    );
    check(at, "composefs-info ls i", "", 0, &listing, "");
    let mut objects = [path.clone(), secret_path.clone()];
    objects.sort();
    let both = format!("{}\n{}\n", objects[0], objects[1]);
    check(at, "composefs-info objects i again", "", 0, &both, "");
    check(at, "composefs-info missing-objects i", "", 0, &both, "");
    check(at, "composefs-info --filter=sub objects i", "", 0, &format!("{path}\n"), "");
    let sub = format!("/sub/\t\n/sub/zeros\t@ {path}\n");
    check(at, "composefs-info ls i --filter sub", "", 0, &sub, "");
    let two = format!("/link\t-> nowhere\n{sub}");
    check(at, "composefs-info --filter=sub --fil=link ls i", "", 0, &two, "");

    // The objects directory has one file per object, readable by all, and no other files.
    let store = "mkcomposefs --use-epoch --skip-xattrs --threads=3 --digest-store=new/store d i2";
    check(at, store, "", 0, "", "");
    assert_eq!(fs::read(at.join("i2")).unwrap(), fs::read(at.join("i")).unwrap());
    let mut found = Vec::new();
    for directory in fs::read_dir(at.join("new/store")).unwrap() {
        for file in fs::read_dir(directory.unwrap().path()).unwrap() {
            let path = file.unwrap().path();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode(), 0o100_644);
            let path = path.strip_prefix(at.join("new/store")).unwrap();
            found.push(path.to_str().unwrap().to_owned());
        }
    }
    found.sort();
    assert_eq!(found, objects);
    assert_eq!(fs::read(at.join("new/store").join(&path)).unwrap(), [0; 100]);
    assert_eq!(fs::read(at.join("new/store").join(&secret_path)).unwrap(), [1; 5000]);
    check(at, "composefs-info --basedir=new/store missing-objects i", "", 0, "", "");
    // An existing object is trusted. The test replaces the file, because a file with fs-verity cannot be changed.
    fs::remove_file(at.join("new/store").join(&path)).unwrap();
    fs::write(at.join("new/store").join(&path), "another").unwrap();
    check(at, store, "", 0, "", "");
    assert_eq!(fs::read(at.join("new/store").join(&path)).unwrap(), b"another");
}

#[test]
fn arguments_of_composefs_info() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    fs::write(at.join("junk"), "xx").unwrap();
    fs::write(at.join("zeros"), [0; 100]).unwrap();
    check(at, "mkcomposefs --from-file - i", ROOT, 0, "", "");
    check(at, "composefs-info", "", 1, "", "No command specified\nUsage: composefs-info ");
    check(at, "composefs-info ls", "", 1, "", "No image path specified");
    check(at, "composefs-info nope i", "", 1, "", "Unknown command 'nope'");
    check(at, "composefs-info --nope ls i", "", 1, "Def\n", "unrecognized option '--nope'");
    check(at, "composefs-info -x ls i", "", 1, "Def\n", "invalid option -- 'x'");
    check(at, "composefs-info --filter=a/b ls i", "", 1, "", "Filter must be a single name: a/b");
    check(at, "composefs-info --basedir=nope ls i", "", 1, "", "Can't open basedir `nope`");
    check(at, "composefs-info ls nope", "", 1, "", "Failed to open 'nope'");
    check(at, "composefs-info ls junk", "", 1, "", "Failed to load 'junk': not an EROFS image");
    check(at, "composefs-info ls /dev/zero", "", 1, "", "it is not a regular file");
    check(at, "composefs-info ls .", "", 1, "", "it is not a regular file");
    check(at, "composefs-info ls i", "", 0, "", "");
    check(at, "composefs-info dump i nope", "", 1, ROOT, "Failed to open 'nope'");
    check(at, "composefs-info measure-file", "", 1, "", "No files specified");
    let zeros = format!("{ZEROS}\n");
    check(at, "composefs-info measure-file zeros nope", "", 1, &zeros, "Failed to open 'nope'");
    check(at, "composefs-info measure-file .", "", 1, "", "failed to measure '.'");
}

#[test]
fn composefs_dump_writes_the_same_image() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    sample(at);
    check(at, "composefs-dump", "", 1, "", "No source path specified\nUsage: composefs-dump ");
    check(at, "composefs-dump i", "", 1, "", "No destination path specified");
    check(at, "composefs-dump nope j", "", 1, "", "Failed to open 'nope'");
    let whiteout = format!("{ROOT}/w 0 20000 1 0 0 0 0.0 - - -\n");
    for (options, input) in [
        ("d", ""),
        ("--from-file -", ROOT),
        ("--from-file -", &whiteout),
        ("--from-file - --max-version=0", &whiteout),
    ] {
        check(at, &format!("mkcomposefs {options} i"), input, 0, "", "");
        check(at, "composefs-dump i j", "", 0, "", "");
        assert_eq!(fs::read(at.join("j")).unwrap(), fs::read(at.join("i")).unwrap(), "{options}");
    }
}

#[test]
fn arguments_of_mount_composefs() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    check(at, "mkcomposefs --from-file - i", ROOT, 0, "", "");
    fs::create_dir(at.join("o")).unwrap();
    let refused =
        |words: &str, why: &str| check(at, &format!("mount.composefs {words}"), "", 1, "", why);
    check(at, "mount.composefs -h", "", 0, "", "Usage: mount.composefs ");
    refused("", "No source path specified\nUsage: mount.composefs ");
    refused("i", "No mount path specified");
    refused("i o", "No object dirs specified");
    refused("-x i o", "invalid option -- 'x'");
    refused("--help", "invalid option -- '-'");
    refused("i o -o", "option requires an argument -- 'o'");
    refused("-t ext4 i o", "Unsupported fs type 'ext4'");
    refused("-o basedir i o", "No value specified for basedir option");
    refused("-o basedir=o,noatime i o", "Unsupported option noatime");
    refused("-o basedir=o:: i o", "Value for basedir option has incorrect format");
    refused("-o basedir=o,upperdir=o i o", "Both workdir and upperdir must be specified");
    refused("-o basedir=o,idmap=nope i o", "Failed to open userns nope");
    refused("-o basedir=o nope o", "Failed to open nope");
    let digest = "00".repeat(32);
    refused(&format!("-o basedir=o,digest={digest} i o"), "Image has no fs-verity");
    refused("-o basedir=o o o", "Failed to mount composefs o");
}

#[test]
fn a_mounted_image_shows_what_it_was_made_from() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    sample(at);
    check(at, "mkcomposefs --digest-store=o d i", "", 0, "", "");
    fs::create_dir(at.join("m")).unwrap();
    symlink(env!("CARGO_BIN_EXE_quire"), at.join("mount.composefs")).unwrap();
    // The test uses a separate mount namespace, so that no mount remains even if it fails.
    let script = |text: &str| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation=private", "sh", "-ec", text]);
        run_command(command, at, b"")
    };
    if !script("mount -t tmpfs none m").status.success() {
        testing::skipped("mounting takes root");
        return;
    }
    let output = script(
        "./mount.composefs -o basedir=o,ro i m; diff -r --no-dereference d m; stat -c %a m/sub m/same",
    );
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "700\n604\n", "{errors}");
    assert!(output.status.success(), "{errors}");
    // Copies of objects have no fs-verity, so they cannot be read, but data in the image can still be read.
    let output = script(
        "cp -r o plain; ./mount.composefs i m -o basedir=plain,verity; cat m/small; ! cat m/same 2>&1",
    );
    let shown = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    // The kernel checks fs-verity digests from Linux 6.6 on.
    let refused = errors.contains("Linux 6.6") && !shown.contains('\0');
    assert!(shown.starts_with("hi\ncat: ") || refused, "{shown}{errors}");
}

/// Returns a file of the folder that `QUIRE_TEST_DATA` names, decompressed if its name ends with `.gz`.
fn test_data(name: &str) -> Option<Vec<u8>> {
    let Some(folder) = std::env::var_os("QUIRE_TEST_DATA") else {
        testing::skipped(&format!("{name}: QUIRE_TEST_DATA is not set"));
        return None;
    };
    let bytes = fs::read(Path::new(&folder).join(name)).unwrap();
    if !name.ends_with(".gz") {
        return Some(bytes);
    }
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&bytes[..]).read_to_end(&mut plain).unwrap();
    Some(plain)
}

/// The expected values are in `composefs-golden.txt` in the same folder, from composefs's own tests.
fn check_golden(name: &str, versions: &str, expect: &str) {
    let Some(dump) = test_data(name) else { return };
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let output = run(at, &format!("mkcomposefs --from-file {versions} - i"), &dump);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(sha256(&at.join("i")), expect, "{name} {versions}");
    // A dump of the image must make the same image again.
    let again = run(at, "composefs-info dump i", b"").stdout;
    let output = run(at, &format!("mkcomposefs --from-file {versions} - j"), &again);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(sha256(&at.join("j")), expect, "{name} {versions}, from its own dump");
}

#[test]
fn golden_images() {
    check_golden(
        "special.dump",
        "--max-version=0",
        "d344782ff962ab7d1c5533755c19c5bf3c3485f55bfaf228fc89524c7e2ba61e",
    );
    check_golden(
        "special.dump",
        "--min-version=1",
        "2b1dfb9ffe6938cb3134c339059572e38cbd8cc515d54758fdff55cad5a37427",
    );
    check_golden(
        "config.dump.gz",
        "",
        "f93737bda1b19d79c8fe2828615b9dd24e4ec5d97410a1ce6e3716b1a778f00f",
    );
}

/// Returns the path of a C tool, in `sid/bin` of the folder that `QUIRE_CACHE` names.
fn theirs(tool: &str) -> Option<PathBuf> {
    testing::built("sid", tool, "sid")
}

/// Pseudo-random numbers that are the same in each run (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % bound
    }

    fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }
}

const LINES: [&str; 13] = [
    "/ 4096 40755 2 0 0 0 0.0 - - -",
    "/d 0 40755 2 0 0 0 3.4 - - - user.a=b",
    "/d/f 5 100644 1 0 0 0 0.0 - hello -",
    "/d/g 100 100644 1 70000 5 0 -5.3 b0/fb44a8078cc2d7d91ede6d16dfe63943613e6286bd7c49efd0223940d51229 - \
     b0fb44a8078cc2d7d91ede6d16dfe63943613e6286bd7c49efd0223940d51229",
    "/d/l 3 120777 1 0 0 0 0.0 tgt - -",
    "/d/h 5 @100644 1 0 0 0 0.0 /d/f hello -",
    "/c 0 20644 1 0 0 261 1.1 - - -",
    "/b 0 60644 1 0 0 261 1.1 - - - security.x=\\x00y",
    "/p 0 10644 1 0 0 0 1.1 - - -",
    "/s 0 140644 1 0 0 0 1.1 - - -",
    "/x 200 100600 1 0 0 0 0.0 ab/cd.file - - trusted.overlay.x=1 user.q=z",
    "/w 0 20000 1 0 0 0 0.0 - - -",
    "/e 0 100644 1 0 0 0 0.0 - - -",
];

const BITS: [&str; 34] = [
    "-",
    "",
    "0",
    "1",
    "-1",
    "+1",
    "/",
    "//",
    ".",
    "..",
    "\\",
    "\\x",
    "\\x00",
    "\\x41",
    "\\n",
    "@",
    "=",
    "a=b",
    " ",
    "\t",
    "\r",
    "5.",
    "1.2",
    "4294967296",
    "18446744073709551616",
    "100644",
    "40755",
    "120777",
    "20644",
    "/d/f",
    "/d",
    "/d/h",
    "\0",
    "0.0",
];

fn mutate(line: &str, random: &mut Random) -> String {
    let mut fields: Vec<&str> = line.split(' ').collect();
    let at = random.below(fields.len());
    let changed = format!("{}{}", fields[at], random.pick(&BITS));
    match random.below(5) {
        0 => fields[at] = random.pick(&BITS),
        1 => drop(fields.remove(at)),
        2 => fields.insert(at, random.pick(&BITS)),
        3 => fields[at] = &changed,
        _ => return line[..random.below(line.len() + 1)].to_owned(),
    }
    fields.join(" ")
}

/// Returns whether `docs/format/dump.md` lists the error as one that the C tools do not report.
fn is_known_difference(errors: &str) -> bool {
    let known = [
        "DIGEST is",
        "GID is",
        "RDEV is",
        "has no target",
        "cannot be hard linked",
        "a file cannot have",
    ];
    known.iter().any(|it| errors.contains(it))
}

#[test]
fn the_same_dumps_are_refused_and_the_same_images_are_made_as_by_c() {
    let Some(theirs) = theirs("mkcomposefs") else { return };
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let mut accepted = 0;
    for _ in 0..250 {
        let mut lines = LINES.map(str::to_owned);
        let line = random.below(lines.len());
        lines[line] = mutate(&lines[line], &mut random);
        let dump = lines.join("\n") + "\n";
        let mut command = Command::new(&theirs);
        command.args(["--from-file", "-", "c"]);
        let c = run_command(command, at, dump.as_bytes());
        let q = run(at, "mkcomposefs --from-file - q", dump.as_bytes());
        let errors = String::from_utf8_lossy(&q.stderr);
        if c.status.success() && is_known_difference(&errors) {
            continue;
        }
        assert_eq!(q.status.code(), c.status.code(), "{:?}: {errors}", lines[line]);
        if c.status.success() {
            let equal = fs::read(at.join("q")).unwrap() == fs::read(at.join("c")).unwrap();
            assert!(equal, "{:?} gives another image", lines[line]);
            accepted += 1;
        }
    }
    assert!(accepted > 25, "only {accepted} dumps were accepted");
}

#[test]
fn the_same_image_of_a_directory_as_by_c() {
    let Some(theirs) = theirs("mkcomposefs") else { return };
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let root = sample(at);
    fs::hard_link(root.join("small"), root.join("sub/again")).unwrap();
    fs::write(root.join("sub/!"), "early").unwrap();
    fs::write(root.join("00"), vec![7; 3_000_000]).unwrap();
    // Any user may make a whiteout.
    let made = Command::new("mknod").current_dir(&root).args(["w", "c", "0", "0"]).status();
    assert!(made.unwrap().success());
    for options in [
        "",
        "--use-epoch",
        "--skip-devices",
        "--skip-xattrs",
        "--user-xattrs",
        "--max-version=0",
        "--min-version=1",
    ] {
        let words = options.split(' ').filter(|it| !it.is_empty()).map(OsString::from);
        let mut command = Command::new(&theirs);
        command.args(words).args(["--print-digest", "d", "c"]);
        let c = run_command(command, at, b"");
        let q = run(at, &format!("mkcomposefs {options} --print-digest d q"), b"");
        assert_eq!(q.status.code(), Some(0), "{}", String::from_utf8_lossy(&q.stderr));
        assert_eq!(q.stdout, c.stdout, "{options}");
        assert_eq!(fs::read(at.join("q")).unwrap(), fs::read(at.join("c")).unwrap(), "{options}");
    }
}

#[test]
fn an_image_longer_than_memory_is_read_as_far_as_needed() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    check(at, "mkcomposefs --from-file - i", ROOT, 0, "", "");
    // Extend the image by a hole of a terabyte.
    fs::File::options().write(true).open(at.join("i")).unwrap().set_len(1 << 40).unwrap();
    check(at, "composefs-info objects i", "", 0, "", "");
    check(at, "composefs-dump i j", "", 0, "", "");
    assert!(at.join("j").metadata().unwrap().len() < 1 << 20);
}
