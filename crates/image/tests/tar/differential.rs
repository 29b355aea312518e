//! Compares how this reader and other programs read tars that those programs made.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::describe::{Record, read};

/// Makes a new directory in cargo's directory for tests.
fn workplace(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("tar-{name}"));
    if path.exists() {
        std::fs::remove_dir_all(&path).unwrap();
    }
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// Runs a program in a directory and returns its output. The exit code is ignored, because tar fails if a format
/// cannot hold a name.
fn run(directory: &Path, program: &str, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .env("LC_ALL", "C.UTF-8")
        .env("TZ", "UTC")
        .stderr(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.code().is_some_and(|code| code <= 2), "{program} {arguments:?}");
    output.stdout
}

/// Runs a Python script with an argument, and returns the lines of its output.
fn python(directory: &Path, script: &str, argument: &str) -> Vec<String> {
    let python = testing::find_program("python3").expect("the test asked for it");
    let mut child = Command::new(python)
        .args(["-", argument])
        .current_dir(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "python3: {}", output.status);
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// Prints the entries that Python's tarfile finds, one line per entry like `Record::line`, then its xattrs.
const LIST: &str = r#"
import decimal, hashlib, sys, tarfile

def raw(name):
    return name.encode("utf-8", "surrogateescape")

def normal(name):
    return b"/".join(part for part in raw(name).split(b"/") if part not in (b"", b"."))

kinds = {b"1": "h", b"2": "l", b"3": "c", b"4": "b", b"5": "d", b"6": "p", b"D": "d"}
with tarfile.open(sys.argv[1], "r:", encoding="utf-8", errors="surrogateescape") as tar:
    for member in tar:
        kind = kinds.get(member.type, "-")
        target = b""
        if kind == "h": target = normal(member.linkname)
        if kind == "l": target = raw(member.linkname)
        device = 0
        if kind in "bc":
            device = member.devmajor << 8 | member.devminor & 255 | (member.devminor & ~255) << 12
        mtime = decimal.Decimal(member.pax_headers.get("mtime", str(member.mtime)))
        seconds = int(mtime.to_integral_value(decimal.ROUND_FLOOR))
        nanoseconds = int((mtime - seconds) * 1000000000)
        digest, size = "", 0
        if kind == "-":
            content = tar.extractfile(member).read()
            digest, size = hashlib.sha256(content).hexdigest(), len(content)
        print(kind, normal(member.name).hex(), target.hex(), device, "%o" % (member.mode & 0o7777),
              member.uid, member.gid, "%d.%09d" % (seconds, nanoseconds), size, digest)
"#;

/// Returns the lines on which all readers should agree.
fn lines(records: &[Record]) -> Vec<String> {
    records.iter().map(Record::line).collect()
}

#[track_caller]
fn check_lines(found: &[String], expected: &[String], what: &str) {
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found, expected, "{what}");
    }
    assert_eq!(found.len(), expected.len(), "{what}");
}

/// Compares with Python, and with the listings of GNU tar and bsdtar. Also checks other ends of the archive.
fn check(directory: &Path, name: &str, readers: &[Tool]) -> Vec<Record> {
    let tar = std::fs::read(directory.join(name)).unwrap();
    let records = read(&tar).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(!records.is_empty(), "{name} is empty");
    for reader in readers {
        match reader {
            Tool::Python => {
                check_lines(
                    &lines(&records),
                    &python(directory, LIST, name),
                    &format!("Python, {name}"),
                );
            }
            Tool::Gnu => {
                let listing = run(
                    directory,
                    "tar",
                    &["--numeric-owner", "--full-time", "--quoting-style=escape", "-tvvf", name],
                );
                let expected: Vec<String> =
                    String::from_utf8(listing).unwrap().lines().map(str::to_owned).collect();
                let found: Vec<String> = records.iter().map(gnu_line).collect();
                check_lines(
                    &found,
                    &expected.iter().map(|line| squeeze(line)).collect::<Vec<_>>(),
                    &format!("GNU tar, {name}"),
                );
            }
            Tool::Bsd if testing::program("bsdtar").is_some() => {
                let option = "--options=mtree:!all,mode,uid,gid,size,time,type,link,sha256,device";
                let argument = format!("@{name}");
                let listing =
                    run(directory, "bsdtar", &["-cf", "-", "--format=mtree", option, &argument]);
                let listing = String::from_utf8(listing).unwrap();
                let mut expected: Vec<String> = listing.lines().skip(1).map(sorted_words).collect();
                let mut found: Vec<String> =
                    records.iter().map(|record| sorted_words(&mtree_line(record))).collect();
                // The entries of an mtree file have another order.
                expected.sort_unstable();
                found.sort_unstable();
                check_lines(&found, &expected, &format!("bsdtar, {name}"));
            }
            Tool::Bsd => {}
        }
    }
    let mut reader = image::tar::Reader::new(&tar[..]);
    let mut end = 0;
    while let Some(entry) = reader.next_entry().unwrap() {
        let data: u64 = entry.segments.iter().map(|segment| segment.length).sum();
        end = (entry.position + data).next_multiple_of(512);
    }
    let without_end = usize::try_from(end).unwrap();
    let other_ends: [&[u8]; 5] = [&[], &[0; 512], &[0; 1024], &[0; 10241], &tar];
    for other in other_ends {
        // A second archive must follow the end, because otherwise its entries would belong to the first.
        let end: &[u8] = if other.len() == tar.len() { &[0; 1024] } else { &[] };
        let changed = [&tar[..without_end], end, other].concat();
        assert_eq!(read(&changed).unwrap(), records, "{name} with {} bytes more", other.len());
    }
    records
}

#[derive(Clone, Copy)]
enum Tool {
    Python,
    Gnu,
    Bsd,
}

const ALL: &[Tool] = &[Tool::Python, Tool::Gnu, Tool::Bsd];

/// Returns the line of GNU tar's listing with `-vv --full-time --numeric-owner`, with single spaces.
fn gnu_line(record: &Record) -> String {
    let bits = |shift: u16, special: u16, letter: char| {
        let bits = record.mode >> shift;
        let execute = match (bits & 1 != 0, record.mode & special != 0) {
            (true, true) => letter,
            (false, true) => letter.to_ascii_uppercase(),
            (true, false) => 'x',
            (false, false) => '-',
        };
        [if bits & 4 == 0 { '-' } else { 'r' }, if bits & 2 == 0 { '-' } else { 'w' }, execute]
    };
    let mode: String = [bits(6, 0o4000, 's'), bits(3, 0o2000, 's'), bits(0, 0o1000, 't')]
        .concat()
        .iter()
        .collect();
    let major = (record.device >> 8) & 0xfff;
    let minor = record.device & 0xff | (record.device >> 12) & 0xfff00;
    let size = match record.kind {
        'b' | 'c' => format!("{major},{minor}"),
        _ => record.size.to_string(),
    };
    let target = match record.kind {
        'h' => format!(" link to {}", escaped(&record.target)),
        'l' => format!(" -> {}", escaped(&record.target)),
        _ => String::new(),
    };
    let name = if record.path.is_empty() { ".".to_owned() } else { escaped(&record.path) };
    let time = clock(record.seconds);
    let (uid, gid, kind) = (record.uid, record.gid, record.kind);
    let fraction = match record.nanoseconds {
        0 => String::new(),
        nanoseconds => format!(".{nanoseconds:09}").trim_end_matches('0').to_owned(),
    };
    format!("{kind}{mode} {uid}/{gid} {size} {time}{fraction} {name}{target}")
}

/// Separates the columns of a listing by single spaces, and normalises the name like the reader.
fn squeeze(line: &str) -> String {
    let mut words = line.split(' ').filter(|word| !word.is_empty());
    let columns: Vec<&str> = words.by_ref().take(5).collect();
    let start = line.find(&format!(" {} ", columns[4])).unwrap() + columns[4].len() + 2;
    let name = line[start..].trim_start().replace(" link to ./", " link to ");
    let name = name.strip_prefix("./").unwrap_or(&name);
    // Directories, and all other names that end with a slash, are listed with a slash.
    let name = name.strip_suffix('/').unwrap_or(name);
    let name = if name.is_empty() { "." } else { name };
    // A mode ends with + for an ACL, and with * for an xattr.
    let mode = columns[0].trim_end_matches(['+', '*', '.']).replace('C', "-");
    format!("{mode} {} {} {} {} {name}", columns[1], columns[2], columns[3], columns[4])
}

/// Escapes a name like GNU's `--quoting-style=escape`, for the bytes that occur in the test's names.
fn escaped(name: &[u8]) -> String {
    let mut text = String::new();
    for chunk in name.utf8_chunks() {
        for letter in chunk.valid().chars() {
            match letter {
                '\n' => text.push_str("\\n"),
                '\\' => text.push_str("\\\\"),
                '\x01'..='\x1f' | '\x7f' => text.push_str(&format!("\\{:03o}", u32::from(letter))),
                letter => text.push(letter),
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\{byte:03o}"));
        }
    }
    text
}

/// Formats a time. Source of the calendar arithmetic: Hinnant, "chrono-compatible low-level date algorithms".
fn clock(seconds: i64) -> String {
    let (days, second) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day = shifted.rem_euclid(146_097);
    let year = (day - day / 1460 + day / 36524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{date:02} {hour:02}:{minute:02}:{second:02}")
}

/// Returns the line that bsdtar writes to an mtree file.
fn mtree_line(record: &Record) -> String {
    use sha2::Digest as _;
    let mut name = String::from(".");
    if !record.path.is_empty() {
        name.push('/');
    }
    name.push_str(&mtree_escaped(&record.path));
    let kind = match record.kind {
        '-' | 'h' => "file",
        'd' => "dir",
        'l' => "link",
        'c' => "char",
        'b' => "block",
        'p' => "fifo",
        other => panic!("{other}"),
    };
    // bsdtar prints nanoseconds without leading zeros.
    let mut line = format!(
        "{name} time={}.{} mode={:o} gid={} uid={} type={kind}",
        record.seconds, record.nanoseconds, record.mode, record.gid, record.uid
    );
    match record.kind {
        '-' => {
            let digest = super::describe::hex(&sha2::Sha256::digest(&record.content));
            line.push_str(&format!(" size={} sha256digest={digest}", record.size));
        }
        'l' => line.push_str(&format!(" link={}", mtree_escaped(&record.target))),
        'b' | 'c' => {
            let major = (record.device >> 8) & 0xfff;
            let minor = record.device & 0xff | (record.device >> 12) & 0xfff00;
            line.push_str(&format!(" device=native,{major},{minor}"));
        }
        'h' => line.push_str(" size=0"),
        _ => {}
    }
    line
}

fn mtree_escaped(name: &[u8]) -> String {
    let mut text = String::new();
    for &byte in name {
        match byte {
            b'!'..=b'~' if !matches!(byte, b'\\' | b'#' | b'=') => text.push(char::from(byte)),
            _ => text.push_str(&format!("\\{byte:03o}")),
        }
    }
    text
}

fn sorted_words(line: &str) -> String {
    let mut words: Vec<&str> = line.split_whitespace().collect();
    words.sort_unstable();
    words.join(" ")
}

/// Makes the directory `tree`, with values that the formats store differently.
const MAKE: &str = r#"
import os, sys
os.mkdir("tree")
os.chdir("tree")
def write(name, content, mode=0o644, mtime=1350244992):
    with open(name, "wb") as file: file.write(content)
    os.chmod(name, mode)
    os.utime(name, ns=(0, mtime * 1000000000 if isinstance(mtime, int) else int(mtime[:-1])))
write(b"empty", b"")
write(b"small", b"hello\n", 0o4755)
write(b"block", b"x" * 512, 0o2711)
write(b"large", bytes(range(256)) * 1000, 0o600)
write(b"nanoseconds", b"n", mtime="1350244992023960108n")
write(b"future", b"f", mtime=4000000000)
write(b"past", b"p", mtime=-1000000)
write(b"odd \n\\ \x01name", b"o")
write(b"latin-\xe9\xff", b"l")
write("ümläut".encode(), b"u")
write(b"name-of-100-bytes-" + b"n" * 82, b"100")
write(b"name-of-101-bytes-" + b"n" * 83, b"101")
write(b"name-of-255-bytes-" + b"n" * 237, b"255")
os.makedirs("deep/" + "/".join("d" * 60 for _ in range(6)), 0o700)
write(b"deep/" + b"/".join(b"d" * 60 for _ in range(2)) + b"/prefix", b"prefix")
write(b"deep/" + b"/".join(b"d" * 60 for _ in range(6)) + b"/long", b"long")
os.symlink("small", "link")
os.symlink("t" * 300, "link-long")
os.symlink(b"\xff/../\n", "link-odd")
os.link("small", "z-hard")
os.link(b"name-of-255-bytes-" + b"n" * 237, "z-hard-to-long")
os.mkfifo("fifo", 0o622)
os.mkdir("sticky"); os.chmod("sticky", 0o1777)
if os.geteuid() == 0:
    os.mknod("null", 0o20666, os.makedev(1, 3))
    os.mknod("block-device", 0o60640, os.makedev(259, 300000))
else:
    print("SKIPPED: device nodes, which need root")
for top, names, files in os.walk(b"."):
    for name in names: os.utime(os.path.join(top, name), (0, 1350244992))
for name in ("link", "link-long", "link-odd", "fifo"):
    os.utime(name, (0, 1350244992), follow_symlinks=False)
os.utime(".", (0, 1350244992))
"#;

/// Packs the tree as `gnu-FORMAT.tar`, owned by large ids. tar leaves out files that a format cannot hold.
#[test]
fn gnu_tar_formats() {
    if testing::program("tar").is_none() || testing::program("python3").is_none() {
        return;
    }
    let directory = workplace("gnu");
    for line in python(&directory, MAKE, "") {
        println!("{line}");
    }
    let owners: [&[&str]; 2] =
        [&["--owner=u:70000", "--group=g:70001"], &["--owner=u:3000000", "--group=g:4000000000"]];
    for (format, owner, entries) in
        [("v7", 0, 13), ("ustar", 0, 16), ("oldgnu", 1, 27), ("gnu", 1, 27), ("pax", 1, 27)]
    {
        let name = format!("gnu-{format}.tar");
        let format = format!("--format={format}");
        let mut arguments = vec![&format[..], "--sort=name", "--numeric-owner", "-cf", &name];
        arguments.extend(owners[owner]);
        arguments.push("./tree");
        run(&directory, "tar", &arguments);
        // bsdtar does not copy pax names that are not UTF-8.
        let tools = &ALL[..if name.contains("pax") { 2 } else { 3 }];
        let records = check(&directory, &name, tools);
        assert!(records.len() >= entries, "{name} has {} entries", records.len());
    }
}

/// Makes files with holes in all positions, for every sparse format.
const MAKE_SPARSE: &str = r#"
import os
os.mkdir("tree")
def write(name, size, *regions):
    with open("tree/" + name, "wb") as file:
        for offset, content in regions:
            file.seek(offset)
            file.write(content)
        file.truncate(size)
    os.utime("tree/" + name, (0, 1350244992))
write("hole", 100000)
write("start", 100007, (0, b"s" * 1000))
write("middle", 100000, (50000, b"m" * 5000))
write("end", 100003, (90112, b"e" * 9891))
write("four", 1 << 20, *((number << 17, b"4" * 4096) for number in range(0, 8, 2)))
write("many", 2 << 20, *((number << 14, b"%d" % number * 300) for number in range(100)))
write("dense", 20000, (0, b"d" * 20000))
write("a" * 150, 50000, (4096, b"long name"))
os.utime("tree", (0, 1350244992))
"#;

#[test]
fn gnu_tar_sparse_files() {
    if testing::program("tar").is_none() || testing::program("python3").is_none() {
        return;
    }
    let directory = workplace("sparse");
    python(&directory, MAKE_SPARSE, "");
    for (name, options) in [
        ("oldgnu", &["--format=oldgnu"][..]),
        ("gnu", &["--format=gnu"]),
        ("pax-0.0", &["--format=pax", "--sparse-version=0.0"]),
        ("pax-0.1", &["--format=pax", "--sparse-version=0.1"]),
        ("pax-1.0", &["--format=pax", "--sparse-version=1.0"]),
    ] {
        let name = format!("sparse-{name}.tar");
        let mut arguments = options.to_vec();
        let detection = "--hole-detection=raw";
        arguments.extend(["--sparse", detection, "--sort=name", "-cf", &name, "tree"]);
        run(&directory, "tar", &arguments);
        // bsdtar drops a hole at the end of a file, so its hash differs. Python uses the placeholder path of GNU tar's
        // format 0.1 instead of the real path.
        let tools = &[Tool::Gnu, Tool::Python][..if name.contains("0.1") { 1 } else { 2 }];
        let records = check(&directory, &name, tools);
        assert_eq!(records.len(), 9);
        for record in &records[1..] {
            let path = std::str::from_utf8(&record.path).unwrap();
            assert!(
                record.content == std::fs::read(directory.join(path)).unwrap(),
                "{name}: {path}"
            );
        }
        let length = std::fs::metadata(directory.join(&name)).unwrap().len();
        assert!(length < 400_000, "{name} has {length} bytes, so its files are not sparse");
    }
}

/// Sets xattrs and ACLs, and prints for each file those that the kernel then has.
const MAKE_XATTRS: &str = r#"
import os, struct, sys
def acl(*entries):
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
none = 0xffffffff
named = acl((1, 6, none), (2, 6, 1001), (2, 4, 70000), (4, 4, none), (8, 5, 5000), (16, 7, none), (32, 4, none))
minimal = acl((1, 7, none), (4, 5, none), (32, 5, none))
files = {
    "plain": {},
    "user": {"user.a": b"b", "user.empty": b"", "user.binary": bytes(range(256)), "user.=%": b"="},
    "acl": {"system.posix_acl_access": named},
    "directory": {"system.posix_acl_access": named, "system.posix_acl_default": minimal},
}
if os.geteuid() == 0:
    files["trusted"] = {"trusted.t": b"\n\0", "security.capability": bytes.fromhex("0100000200200000000000000000000000000000")}
os.mkdir("tree")
try:
    for name, xattrs in files.items():
        path = "tree/" + name
        os.mkdir(path) if name == "directory" else open(path, "w").close()
        for key, value in xattrs.items(): os.setxattr(path, key, value)
except OSError as error:
    print("SKIPPED: this file system has no xattrs or ACLs:", error)
    sys.exit()
for name in sorted(files):
    path = "tree/" + name
    print(name, *sorted(key.encode().hex() + "=" + os.getxattr(path, key).hex() for key in os.listxattr(path)))
"#;

#[test]
fn xattrs_and_acls() {
    if testing::program("tar").is_none() || testing::program("python3").is_none() {
        return;
    }
    let directory = workplace("xattrs");
    let expected = python(&directory, MAKE_XATTRS, "");
    if expected[0].starts_with("SKIPPED") {
        println!("{}", expected[0]);
        return;
    }
    let gnu = [
        "--format=pax",
        "--numeric-owner",
        "--xattrs",
        "--xattrs-include=*",
        "--acls",
        "--sort=name",
    ];
    run(&directory, "tar", &[&gnu[..], &["-cf", "gnu.tar", "tree"]].concat());
    let mut archives = vec!["gnu.tar"];
    // libarchive reads no security and trusted xattrs on Linux, so those are left out below.
    if testing::program("bsdtar").is_some() {
        let files = ["tree/acl", "tree/directory", "tree/plain", "tree/trusted", "tree/user"];
        run(&directory, "bsdtar", &[&["--format=pax", "-cf", "bsd.tar"], &files[..]].concat());
        archives.push("bsd.tar");
    }
    for name in archives {
        let found: Vec<String> = read(&std::fs::read(directory.join(name)).unwrap())
            .unwrap()
            .iter()
            .filter(|record| record.path != b"tree")
            .map(|record| {
                let mut line = String::from_utf8(record.path[5..].to_vec()).unwrap();
                for (name, value) in &record.xattrs {
                    use super::describe::hex;
                    line.push_str(&format!(" {}={}", hex(name), hex(value)));
                }
                line
            })
            .collect();
        assert_eq!(found, expected, "{name}");
    }
}

/// Makes tars without a file system.
const MAKE_BY_PYTHON: &str = r#"
import io, sys, tarfile
formats = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "times": tarfile.PAX_FORMAT}
which = sys.argv[1]
with tarfile.open("python-%s.tar" % which, "w", format=formats[which], encoding="utf-8", errors="surrogateescape",
                  pax_headers={"comment": "global"} if which == "pax" else None) as tar:
    def add(name, content=b"", **fields):
        info = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
        info.size = len(content)
        for key, value in fields.items(): setattr(info, key, value)
        try: tar.addfile(info, io.BytesIO(content))
        except ValueError: pass
    add(b"./", type=tarfile.DIRTYPE, mode=0o755)
    add(b"./plain", b"hello", mode=0o640, uid=1, gid=2, mtime=3)
    add(b"contiguous", b"hello", type=tarfile.CONTTYPE)
    add(b"old", b"hello", type=tarfile.AREGTYPE)
    add(b"large-ids", uid=(1 << 21), gid=(1 << 32) - 2)
    add(b"past", mtime=-1)
    add(b"distant-past", mtime=-(1 << 40))
    add(b"distant-future", mtime=1 << 40)
    add(b"p" * 90 + b"/" + b"q" * 90, b"prefix")
    add(b"/".join([b"l" * 200] * 10), b"long")
    add(b"\xff\xfe", b"bytes")
    add("\N{SNOWMAN}".encode(), b"text")
    add(b"symlink", type=tarfile.SYMTYPE, linkname="../" * 100 + "up")
    add(b"hard", type=tarfile.LNKTYPE, linkname="./plain")
    add(b"char", type=tarfile.CHRTYPE, devmajor=4095, devminor=1048575, mode=0o666)
    add(b"block", type=tarfile.BLKTYPE, devmajor=8, devminor=0)
    add(b"fifo", type=tarfile.FIFOTYPE)
    for number in range(520):
        add(b"sizes/%d" % number, b"s" * number)
    def pax(name, **headers): add(name, b"p", pax_headers=headers)
    if which == "pax":
        pax(b"fraction", mtime="1350244992.023960108")
        pax(b"fine-fraction", mtime="0.1234567899")
        pax(b"override", path="overridden", uid="77", gid="78")
    if which == "times":
        pax(b"negative-fraction", mtime="-1.25")
        pax(b"nearly-one", mtime="-0.99999999999")
"#;

#[test]
fn python_formats() {
    if testing::program("python3").is_none() || testing::program("tar").is_none() {
        return;
    }
    let directory = workplace("python");
    for (format, entries) in [("ustar", 530), ("gnu", 537), ("pax", 540)] {
        python(&directory, MAKE_BY_PYTHON, format);
        let tools = &[Tool::Python, Tool::Gnu];
        let records = check(&directory, &format!("python-{format}.tar"), tools);
        assert!(records.len() >= entries, "{format}: {}", records.len());
    }
    // The other two programs list negative fractions of seconds as positive ones.
    python(&directory, MAKE_BY_PYTHON, "times");
    check(&directory, "python-times.tar", &[Tool::Python]);
}

#[test]
fn bsdtar_formats() {
    if testing::program("tar").is_none()
        || testing::program("python3").is_none()
        || testing::program("bsdtar").is_none()
    {
        return;
    }
    let directory = workplace("bsd");
    python(&directory, MAKE, "");
    // bsdtar stops at a name that a format cannot hold, so such names are removed.
    for name in ["past", "latin-\\351\\377", "odd"] {
        run(&directory, "sh", &["-c", &format!("rm -f tree/$(printf '{name}')*")]);
    }
    for format in ["pax", "paxr", "gnutar", "ustar", "v7tar"] {
        let name = format!("bsd-{format}.tar");
        let owner = ["--uid", "70000", "--gid", "70001", "--uname", "", "--gname", ""];
        let format = format!("--format={format}");
        run(&directory, "bsdtar", &[&[&format[..], "-cf", &name], &owner[..], &["tree"]].concat());
        let records = check(&directory, &name, ALL);
        assert!(records.len() >= 12, "{name} has {} entries", records.len());
    }
}

/// Tests global headers that change entries, labels, directories with lists of names, and blocking factors.
#[test]
fn gnu_tar_oddities() {
    if testing::program("tar").is_none() || testing::program("python3").is_none() {
        return;
    }
    let directory = workplace("oddities");
    python(&directory, MAKE, "");
    let tar = |name: &str, options: &[&str]| {
        run(&directory, "tar", &[&["--sort=name", "-cf", name], options, &["tree"]].concat());
    };
    tar("global.tar", &["--format=pax", "--pax-option=uid=77,mtime=5.5,comment=hello"]);
    let records = check(&directory, "global.tar", &[Tool::Python, Tool::Gnu]);
    assert!(records.iter().all(|record| record.uid == 77));
    tar("delete.tar", &["--format=pax", "--pax-option=delete=atime,delete=mtime"]);
    check(&directory, "delete.tar", &[Tool::Python, Tool::Gnu]);
    tar("blocking.tar", &["-b", "1"]);
    check(&directory, "blocking.tar", ALL);
    tar("incremental.tar", &["--format=gnu", "--listed-incremental=snapshot"]);
    // GNU tar lists a directory with the size of its list of names, and Python treats the time in its header as a
    // prefix.
    let records = check(&directory, "incremental.tar", &[Tool::Bsd]);
    assert_eq!(records.iter().filter(|record| record.kind == 'd').count(), 9);
    // GNU tar and Python list a volume label as an entry, but it is not a file.
    tar("label.tar", &["--format=gnu", "--label=volume"]);
    tar("plain.tar", &["--format=gnu"]);
    let label = read(&std::fs::read(directory.join("label.tar")).unwrap()).unwrap();
    assert_eq!(label, read(&std::fs::read(directory.join("plain.tar")).unwrap()).unwrap());
}
