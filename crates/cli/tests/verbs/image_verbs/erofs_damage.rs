//! Damaged EROFS images and disks, outside of a store and inside, through every command that reads them. Each command
//! ends with a result or an error, in bounded time and memory. `erofs_mutations` of `transfer` reads more of them, in
//! one process.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::mounting::mounts::Unmount;
use crate::{Place, Ran, is_root, write};

/// Commands that only read, with `SOURCE` for the image.
const READERS: [&str; 6] = [
    "ls -lR SOURCE",
    "cat SOURCE:/words",
    "tree SOURCE",
    "diff a SOURCE",
    "dump SOURCE",
    "show SOURCE",
];

/// Commands that write into a store, which wait for the disk. A mount imports the image.
const WRITERS: [&str; 3] = ["import --quiet SOURCE b", "build SOURCE OUT", "mount SOURCE OUT"];

/// Commands for an image of a store, whose name is `a`. `other` is a sound image.
const OF_STORE: [&str; 15] = [
    "ls -lR a",
    "cat a:/words",
    "tree a",
    "diff other a",
    "dump a",
    "show a",
    "verify a",
    "fsck",
    "export --quiet a erofs:OUT",
    "export --quiet a tar:OUT",
    "export --quiet --platform linux/amd64 a disk:OUT",
    "merge --quiet other a both",
    "filter --quiet --exclude words a part",
    "mount a OUT",
    "bundle --writable none --shared-devices --vm OUT a",
];

/// Limits of a command: address space in bytes, and seconds. Both are far above what a sound image takes.
const MEMORY: u64 = 3 << 30;
const SECONDS: &str = "60";

/// A sound image: its kind of source, the file, and the position of the image in it.
struct Sound {
    kind: &'static str,
    file: String,
    start: usize,
}

/// Runs a command within the limits. If it takes longer, its exit code is 124.
fn run(place: &Place, line: &str) -> Ran {
    let arguments: Vec<&str> = line.split(' ').collect();
    let quire = place.command(&arguments);
    let mut command = testing::command("prlimit").expect("the test has looked for it");
    command.arg(format!("--as={MEMORY}")).args(["--", "timeout", SECONDS]);
    command.arg(quire.get_program()).args(quire.get_args());
    for (name, value) in quire.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).current_dir(place.folder.path());
    Ran::from_output(&command.output().unwrap())
}

/// Exit codes of a command that has a result, or an error.
fn allowed(line: &str) -> &'static [i32] {
    match line.split(' ').next() {
        Some("diff" | "verify" | "fsck") => &[0, 1, 2],
        _ => &[0, 2],
    }
}

/// Runs a command that may make `OUT`, which is removed afterwards. Returns whether the command refused the image.
fn check(place: &Place, line: &str, out: &Path) -> bool {
    let is_mount = line.starts_with("mount ");
    if is_mount {
        std::fs::create_dir(out).unwrap();
    }
    let guard = is_mount.then(|| Unmount(out.to_owned()));
    let ran = run(place, line);
    let code = ran.code.unwrap_or(-1);
    let error = ran.err.chars().take(2000).collect::<String>();
    assert!(allowed(line).contains(&code), "{line}: {:?} {error}", ran.code);
    assert!(!ran.err.contains("panicked"), "{line}: {error}");
    if is_mount && code == 0 {
        let ran = place.run(&format!("umount {}", out.display()));
        assert_eq!(ran.code, Some(0), "{line}: {}", ran.err);
    }
    drop(guard);
    match out.symlink_metadata() {
        Ok(found) if found.is_dir() => std::fs::remove_dir_all(out).unwrap(),
        Ok(_) => std::fs::remove_file(out).unwrap(),
        Err(_) => {}
    }
    code == 2
}

/// Bytes of a random stream that one damage takes.
const PIECE: usize = 32;

/// Changes some bytes of an image that begins at `start`, and sometimes the length. The case decides where most of the
/// changes are.
fn damage(sound: &[u8], start: usize, case: usize, random: &[u8]) -> Vec<u8> {
    let mut bytes = sound.to_vec();
    let number = |piece: &[u8]| usize::from(u16::from_le_bytes([piece[0], piece[1]]));
    let (head, changes) = random.split_at(4);
    for change in changes.chunks(4).take(1 + usize::from(head[0]) % 6) {
        let at = match case % 4 {
            // The superblock.
            0 => start + 1024 + number(change) % 128,
            // The partition table, or the whole image.
            1 if start > 0 => number(change) % (34 * 512),
            1 => number(change) * 251 % bytes.len(),
            // Most metadata is in the first blocks.
            _ => start + 1024 + number(change) % 8192.min(bytes.len() - start - 1024),
        };
        bytes[at] = match change[2] % 4 {
            0 => bytes[at] ^ 1 << (change[3] % 8),
            1 => 0xff,
            2 => bytes[at].wrapping_add(1),
            _ => change[3],
        };
    }
    if head[1].is_multiple_of(8) {
        bytes.truncate(number(&head[2..]) * 251 % sound.len());
    }
    bytes
}

/// Makes a tree with many kinds of files.
fn tree(place: &Place) {
    let tree = place.path("tree");
    testing::trees::rich_tree(&tree);
    for name in ["sparse", "usr/lib/1048579", "usr/lib/524291"] {
        std::fs::remove_file(tree.join(name)).unwrap();
    }
    write(&tree.join("words"), "words that compress ".repeat(2000).as_bytes(), 0o644);
}

/// Makes an image of each kind. An image of composefs is read with its objects.
fn sound(place: &Place) -> Vec<Sound> {
    tree(place);
    place.out("import --quiet dir:tree a");
    place.out("export --quiet a erofs:a.erofs");
    place.out("export --quiet --dax a erofs:dax.erofs");
    place.out("build --digest-store objects dir:tree a.cfs");
    let erofs = |file: String| Sound { kind: "erofs", file, start: 0 };
    let mut made: Vec<_> =
        ["a.erofs", "dax.erofs", "a.cfs"].map(|it| erofs(it.to_owned())).into_iter().collect();
    place.out("export --quiet --platform linux/amd64 a disk:a.disk");
    made.push(Sound { kind: "disk", file: "a.disk".to_owned(), start: 1 << 20 });
    let writers = [
        (testing::find_program("mkfs.erofs"), &["", "-zlz4"][..]),
        (testing::built("sid", "mkfs.erofs", "sid"), &["-zlzma", "-zdeflate", "-zzstd"]),
    ];
    for (mkfs, lines) in writers {
        let Some(mkfs) = mkfs else {
            testing::not_made("mkfs.erofs, or a newer one,", "sid");
            continue;
        };
        for line in lines {
            let file = format!("mkfs{line}.erofs");
            let mut command = Command::new(&mkfs);
            command.args(line.split_whitespace()).arg(&file).arg("tree");
            let output = command.current_dir(place.folder.path()).output().unwrap();
            let err = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{line}: {err}");
            made.push(erofs(file));
        }
    }
    made
}

/// Passes damaged copies of an image to the commands. `random` has a piece for each case.
fn damage_one(place: &Place, it: &Sound, random: &[u8]) {
    let Sound { kind, file, start } = it;
    let mut bytes = std::fs::read(place.path(file)).unwrap();
    // The superblock's checksum would refuse nearly all changes.
    bytes[start + 1024 + 8] &= !1;
    let name = format!("damaged-{file}");
    let out = place.path(&format!("out-{file}"));
    let fill = |command: &str| {
        let line = command.replace("SOURCE", &format!("{kind}:{name}"));
        let line = line.replace("OUT", out.to_str().unwrap());
        match file.ends_with(".cfs") && line.starts_with("import ") {
            true => line.replace("import ", "import --objects objects "),
            false => line,
        }
    };
    // The data of an image of composefs is elsewhere, and only `import` finds it.
    let is_elsewhere = |command: &str| {
        let needs_data = ["cat ", "mount ", "build "].iter().any(|it| command.starts_with(it));
        file.ends_with(".cfs") && needs_data
    };
    let writers = WRITERS.iter().filter(|it| !it.starts_with("mount ") || is_root());
    let writers: Vec<_> = writers.copied().collect();
    write(&place.path(&name), &bytes, 0o644);
    for command in READERS.iter().chain(&writers) {
        let refused = check(place, &fill(command), &out);
        assert!(!refused || is_elsewhere(command), "{file}: {command}: a sound image is refused");
    }
    let (mut calls, mut refused) = (0, 0);
    let cases = random.len() / PIECE;
    for (case, piece) in random.chunks(PIECE).enumerate() {
        write(&place.path(&name), &damage(&bytes, *start, case, piece), 0o644);
        // A few of many calls wait for the disk in a test of minutes.
        let may_wait = cases > 100 || case % 10 < 2;
        for command in READERS.iter().chain(writers.iter().filter(|_| may_wait)) {
            let is_refused = check(place, &fill(command), &out);
            if !is_elsewhere(command) {
                calls += 1;
                refused += usize::from(is_refused);
            }
        }
    }
    // Changes of file contents and of times, for example, cannot be found.
    assert!(refused > calls / 20, "{file}: only {refused} of {calls} calls were refused");
}

#[test]
fn every_command_ends_with_a_result_or_an_error() {
    if !testing::long_tests() || !testing::programs(&["prlimit", "timeout"]) {
        return;
    }
    let place = Place::new();
    let cases = if testing::rounds(1) > 1 { 2000 } else { 100 };
    let sound = sound(&place);
    let random = testing::noise(sound.len() * cases * PIECE);
    let parts: Vec<_> = sound.iter().zip(random.chunks(cases * PIECE)).collect();
    // Two of them at a time.
    std::thread::scope(|scope| {
        for half in parts.chunks(parts.len().div_ceil(2)) {
            let place = &place;
            scope.spawn(move || half.iter().for_each(|(it, random)| damage_one(place, it, random)));
        }
    });
    assert_eq!(place.run("fsck").code, Some(0));
}

/// Returns the file of the only image of a store that is not in `others`.
fn image_file(place: &Place, others: &[PathBuf]) -> PathBuf {
    let found = std::fs::read_dir(place.path("store/images")).unwrap();
    let mut found = found.map(|it| it.unwrap().path()).filter(|it| !others.contains(it));
    let file = found.next().unwrap();
    assert_eq!(found.next(), None, "{}", file.display());
    file
}

/// A damaged image of a store is an error of each command, and `fsck` and `verify` find it.
#[test]
fn damaged_images_of_a_store_are_found() {
    if !testing::long_tests() || !testing::programs(&["prlimit", "timeout"]) {
        return;
    }
    let cases = if testing::rounds(1) > 1 { 200 } else { 10 };
    for form in ["objects", "packed"] {
        let place = Place::new();
        tree(&place);
        // Only the form `objects` has such devices.
        let _removed = std::fs::remove_file(place.path("tree/whiteout"));
        place.tree("small", "x");
        place.out(&format!("import --quiet --form {form} dir:small other"));
        let other = image_file(&place, &[]);
        place.out(&format!("import --quiet --form {form} dir:tree a"));
        let file = image_file(&place, &[other]);
        let sound = std::fs::read(&file).unwrap();
        let out = place.path("out");
        let commands = OF_STORE.iter().filter(|it| match it.split(' ').next() {
            Some("mount") => is_root(),
            Some("bundle") => form == "packed",
            _ => true,
        });
        let commands: Vec<_> =
            commands.map(|it| it.replace("OUT", out.to_str().unwrap())).collect();
        for command in &commands {
            assert!(!check(&place, command, &out), "{form}: {command}: a sound image is refused");
        }
        let random = testing::noise(cases * PIECE);
        for (case, piece) in random.chunks(PIECE).enumerate() {
            let damaged = damage(&sound, 0, case, piece);
            if damaged == sound {
                continue;
            }
            // The file cannot be written where it has fs-verity.
            std::fs::remove_file(&file).unwrap();
            write(&file, &damaged, 0o444);
            for command in &commands {
                check(&place, command, &out);
            }
            for command in ["verify a", "fsck"] {
                let ran = run(&place, command);
                assert_eq!(ran.code, Some(1), "{form}: {command}: {}", ran.err);
            }
        }
        std::fs::remove_file(&file).unwrap();
        write(&file, &sound, 0o444);
        assert_eq!(place.run("verify a").code, Some(0));
    }
}
