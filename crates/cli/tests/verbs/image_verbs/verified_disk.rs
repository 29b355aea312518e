//! Disks with dm-verity hash trees and signatures, as other programs read them.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::{Place, write};

const MIB: usize = 1 << 20;

/// An image `a`.
fn place() -> Place {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    write(&tree.join("large"), &[b'l'; 3_000_000], 0o4711);
    place.out("import --quiet dir:tree a");
    place
}

/// Runs another program; `None` if it is not installed.
fn run(place: &Place, name: &str, words: &[&str]) -> Option<Output> {
    let mut command = testing::command(name)?;
    Some(command.args(words).current_dir(place.folder.path()).output().unwrap())
}

/// Returns the output of another program that succeeds; `None` if it is not installed.
#[track_caller]
fn ask(place: &Place, name: &str, words: &[&str]) -> Option<String> {
    let output = run(place, name, words)?;
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {words:?}: {out}{err}");
    Some(out)
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Writes each partition of a disk into a file `NAME.partition`, and returns the partitions as sfdisk lists them;
/// `None` without sfdisk.
fn partitions(place: &Place, disk: &str) -> Option<Vec<Value>> {
    let table = json(&ask(place, "sfdisk", &["--json", disk])?);
    let partitions = table["partitiontable"]["partitions"].as_array().unwrap().clone();
    let bytes = std::fs::read(place.path(disk)).unwrap();
    for it in &partitions {
        let number = |name: &str| usize::try_from(it[name].as_u64().unwrap() * 512).unwrap();
        let (start, size) = (number("start"), number("size"));
        let file = place.path(&format!("{}.partition", it["name"].as_str().unwrap()));
        std::fs::write(file, &bytes[start..start + size]).unwrap();
    }
    Some(partitions)
}

/// Returns a UUID's digits as sfdisk prints the UUID.
fn uuid(digits: &str) -> String {
    let it = digits.to_uppercase();
    format!("{}-{}-{}-{}-{}", &it[..8], &it[8..12], &it[12..16], &it[16..20], &it[20..])
}

#[test]
fn veritysetup_finds_the_tree_right() {
    let place = place();
    place.out("export --quiet a erofs:a.erofs");
    let line = "export --platform linux/amd64 --verity --json a disk:a.disk";
    let told = json(&place.out(line));
    let root_hash = told["rootHash"].as_str().unwrap();
    let disk = std::fs::read(place.path("a.disk")).unwrap();
    assert_eq!(told["bytes"], disk.len());
    assert!(told["certificate"].is_null());
    // The first partition is the image, as without the tree.
    assert!(disk[MIB..].starts_with(&std::fs::read(place.path("a.erofs")).unwrap()));
    // A second export writes the same bytes.
    place.out(&line.replace("export", "export --force"));
    assert!(std::fs::read(place.path("a.disk")).unwrap() == disk);
    let text = place.out("export --platform linux/amd64 --verity a disk:b.disk");
    assert!(text.contains(&format!("root hash {root_hash}\n")), "{text}");
    let Some(partitions) = partitions(&place, "a.disk") else { return };
    assert_eq!(partitions.len(), 2);
    let (root, tree) = (&partitions[0], &partitions[1]);
    assert_eq!(root["type"], "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709");
    assert_eq!(tree["type"], "2C7357ED-EBD2-46D9-AEC1-23D437EC2BF5");
    // The ids are the halves of the root hash.
    assert_eq!(root["uuid"], uuid(&root_hash[..32]));
    assert_eq!(tree["uuid"], uuid(&root_hash[32..]));
    assert_eq!(told["partition"], uuid(&root_hash[..32]).to_lowercase());
    for (it, name) in [(root, "root"), (tree, "root-verity")] {
        assert_eq!((&it["name"], &it["attrs"]), (&name.into(), &"GUID:60".into()));
    }
    ask(&place, "sfdisk", &["--verify", "a.disk"]);
    if let Some(said) = ask(&place, "sgdisk", &["--verify", "a.disk"]) {
        assert!(said.contains("No problems found"), "{said}");
    }
    let words = ["verify", "root.partition", "root-verity.partition", root_hash];
    let Some(verified) = run(&place, "veritysetup", &words) else { return };
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
    let dump = ask(&place, "veritysetup", &["dump", "root-verity.partition"]).unwrap();
    for line in ["Hash type:       \t1", "Data block size: \t4096", "Hash algorithm:  \tsha256"] {
        assert!(dump.contains(line), "{dump}");
    }
    // cryptsetup makes the same tree.
    let salt = dump.lines().find_map(|it| it.strip_prefix("Salt:")).unwrap().trim();
    let salt = format!("--salt={salt}");
    let words = ["format", "root.partition", "own", &salt, "--no-superblock"];
    let made = ask(&place, "veritysetup", &words).unwrap();
    assert!(made.contains(root_hash), "{made}");
    let own = std::fs::read(place.path("own")).unwrap();
    let ours = std::fs::read(place.path("root-verity.partition")).unwrap();
    assert!(!own.is_empty() && ours[4096..].starts_with(&own));
    // It finds damage, so the test would find a wrong tree.
    let mut bytes = std::fs::read(place.path("root.partition")).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(place.path("root.partition"), bytes).unwrap();
    let words = ["verify", "root.partition", "root-verity.partition", root_hash];
    assert!(!run(&place, "veritysetup", &words).unwrap().status.success());
}

/// sfdisk has names for the types of all architectures but the two of big-endian MIPS.
#[test]
fn types_are_those_of_other_programs() {
    let place = place();
    keys(&place, "rsa:2048");
    let Some(listed) = ask(&place, "sfdisk", &["--label", "gpt", "--list-types"]) else { return };
    for (architecture, name) in [
        ("386", "x86"),
        ("amd64", "x86-64"),
        ("arm", "ARM"),
        ("arm64", "ARM-64"),
        ("loong64", "LoongArch-64"),
        ("mips64le", "MIPS-64 LE"),
        ("mipsle", "MIPS-32 LE"),
        ("ppc64", "PPC64"),
        ("ppc64le", "PPC64LE"),
        ("riscv64", "RISC-V-64"),
        ("s390x", "S390X"),
    ] {
        place.out(&format!(
            "export --quiet --force --platform linux/{architecture} --private-key key.pem \
             --certificate certificate.pem a disk:a.disk"
        ));
        let found = partitions(&place, "a.disk").unwrap();
        let kinds = ["root", "root verity", "root verity sign."];
        assert_eq!(found.len(), kinds.len());
        for (found, kind) in found.iter().zip(kinds) {
            let line = format!("{}  Linux {kind} ({name})", found["type"].as_str().unwrap());
            assert!(listed.lines().any(|it| it.trim() == line), "{line}");
        }
    }
}

/// Makes `key.pem` and `certificate.pem` for it.
fn keys(place: &Place, kind: &str) {
    let mut words = vec!["req", "-x509", "-nodes", "-newkey", kind, "-subj", "/CN=test/O=a"];
    words.extend(["-days", "2", "-keyout", "key.pem", "-out", "certificate.pem"]);
    if kind == "ec" {
        words.extend(["-pkeyopt", "ec_paramgen_curve:prime256v1"]);
    }
    ask(place, "openssl", &words).expect("openssl is installed");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(place.path("key.pem"), mode).unwrap();
}

const SIGNED: &str =
    "export --platform linux/amd64 --private-key key.pem --certificate certificate.pem --json a";

#[test]
fn openssl_finds_the_signature_right() {
    let place = place();
    keys(&place, "rsa:2048");
    let ran = place.run(&format!("{SIGNED} disk:a.disk"));
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
    let told = json(&ran.out);
    let root_hash = told["rootHash"].as_str().unwrap();
    place.out(&format!("{SIGNED} disk:b.disk"));
    assert!(read(&place.path("a.disk")) == read(&place.path("b.disk")));
    let Some(partitions) = partitions(&place, "a.disk") else { return };
    assert_eq!(partitions.len(), 3);
    let it = &partitions[2];
    assert_eq!(it["type"], "41092B05-9FC8-4523-994F-2DEF0408B176");
    assert_eq!((&it["name"], &it["attrs"]), (&"root-verity-sig".into(), &"GUID:60".into()));
    // Zeros follow the JSON.
    let content = read(&place.path("root-verity-sig.partition"));
    let end = content.iter().position(|it| *it == 0).unwrap();
    assert!(content[end..].iter().all(|it| *it == 0));
    let content: Value = serde_json::from_slice(&content[..end]).unwrap();
    let names: Vec<_> = content.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["rootHash", "certificateFingerprint", "signature"]);
    assert_eq!(content["rootHash"], root_hash);
    let words = ["x509", "-in", "certificate.pem", "-noout", "-fingerprint", "-sha256"];
    let fingerprint = ask(&place, "openssl", &words).unwrap();
    let fingerprint = fingerprint.trim().rsplit('=').next().unwrap().replace(':', "");
    assert_eq!(content["certificateFingerprint"], fingerprint.to_lowercase());
    assert_eq!(told["certificate"], fingerprint.to_lowercase());
    write(&place.path("signature"), content["signature"].as_str().unwrap().as_bytes(), 0o644);
    ask(&place, "openssl", &["base64", "-d", "-A", "-in", "signature", "-out", "signature.der"]);
    write(&place.path("hash"), root_hash.as_bytes(), 0o644);
    let verify = |program: &str| {
        let words = [program, "-verify", "-binary", "-inform", "DER", "-in", "signature.der"];
        let more = ["-content", "hash", "-CAfile", "certificate.pem", "-purpose", "any"];
        run(&place, "openssl", &[&words[..], &more].concat()).unwrap()
    };
    for program in ["smime", "cms"] {
        let output = verify(program);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    // openssl makes the same bytes.
    let words = ["smime", "-sign", "-binary", "-noattr", "-md", "sha256", "-outform", "DER"];
    let more = ["-in", "hash", "-signer", "certificate.pem", "-inkey", "key.pem", "-out", "own"];
    ask(&place, "openssl", &[&words[..], &more].concat());
    assert_eq!(read(&place.path("own")), read(&place.path("signature.der")));
    write(&place.path("hash"), root_hash.replace('0', "1").as_bytes(), 0o644);
    assert!(!verify("smime").status.success());
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[test]
fn keys_that_cannot_sign_leave_no_disk() {
    let place = place();
    let check = |text: &str| {
        let ran = place.run(&format!("{} disk:new", SIGNED.replace("--json ", "")));
        assert_eq!(ran.code, Some(2), "{text}: {}", ran.err);
        assert!(ran.err.contains(text), "{text}: {}", ran.err);
        assert!(!place.path("new").exists());
    };
    check("cannot read key.pem");
    keys(&place, "ec");
    check("cannot sign with key.pem: it has no RSA key of 2048 to 4096 bits");
    keys(&place, "rsa:1024");
    check("it has no RSA key of 2048 to 4096 bits");
    keys(&place, "rsa:2048");
    let key = read(&place.path("key.pem"));
    let certificate = read(&place.path("certificate.pem"));
    keys(&place, "rsa:2048");
    write(&place.path("certificate.pem"), &certificate, 0o644);
    check("cannot sign with certificate.pem: its certificate is for another key");
    write(&place.path("certificate.pem"), &key, 0o644);
    check("it has no certificate in PEM");
    write(&place.path("certificate.pem"), &[b'a'; 100_000], 0o644);
    check("certificate.pem is too large: it has more than 65536 bytes");
    write(&place.path("certificate.pem"), &certificate, 0o644);
    write(&place.path("key.pem"), &key, 0o644);
    check("other users have permissions for the private key key.pem: `chmod 600 key.pem`");
    write(&place.path("key.pem"), &key, 0o600);
    place.out(&format!("{SIGNED} disk:new"));
}

#[test]
fn systemd_recognizes_the_partitions() {
    let place = place();
    keys(&place, "rsa:2048");
    place.out(&format!("{SIGNED} disk:a.raw"));
    if !crate::is_root() || !Path::new("/dev/loop-control").exists() {
        testing::skipped("what systemd recognizes on a disk: there are no loop devices");
        return;
    }
    let Some(said) = ask(&place, "systemd-dissect", &["--json=short", "a.raw"]) else { return };
    assert!(said.contains("signed"), "{said}");
}

const STUB: &str = "/usr/lib/systemd/boot/efi/linuxx64.efi.stub";
const BOOT: &str = "export --platform linux/amd64 --bootable --kernel kernel --json a";

/// The beginning of a kernel for x86 as far as its version.
fn kernel() -> Vec<u8> {
    let mut kernel: Vec<u8> = (0..251).cycle().take(100_000).collect();
    kernel[0x202..0x206].copy_from_slice(b"HdrS");
    kernel[0x20e..0x210].copy_from_slice(&[0, 1]);
    kernel[0x300..0x30c].copy_from_slice(b"6.1.0-1 (a)\0");
    kernel
}

/// Compares `boot.efi` with the boot program that systemd's ukify makes of the same parts: each section must have the
/// same length and the same bytes.
fn ukify_makes_the_same(place: &Place, command_line: &str) {
    let Some(ukify) = testing::ukify() else { return };
    // Debian's Python has Debian's packages, but another one may come first in `PATH`.
    let pythons = ["/usr/bin/python3", "python3"].into_iter();
    let mut pythons = pythons.filter(|it| {
        let found = run(place, it, &["-c", "import pefile"]);
        found.is_some_and(|it| it.status.success())
    });
    let Some(python) = pythons.next() else {
        testing::skipped("python3-pefile is not installed");
        return;
    };
    let ukify = ukify.display().to_string();
    write(&place.path("os-release"), b"ID=test\n", 0o644);
    let cmdline = format!("--cmdline={command_line}");
    let stub = format!("--stub={STUB}");
    let words = [
        &ukify,
        "build",
        "--linux=kernel",
        "--initrd=first",
        "--initrd=second",
        &cmdline,
        &stub,
        "--uname=6.1.0-1",
        "--os-release=@os-release",
        "--efi-arch=x64",
        "--output=own.efi",
    ];
    ask(place, python, &words).unwrap();
    let [ours, own] = ["boot.efi", "own.efi"].map(|file| {
        let told = ask(place, python, &[&ukify, "inspect", file, "--json=short"]).unwrap();
        json(told.lines().last().unwrap())
    });
    for section in [".osrel", ".cmdline", ".uname", ".initrd", ".linux"] {
        for field in ["size", "sha256"] {
            let (ours, own) = (&ours[section][field], &own[section][field]);
            assert!(!own.is_null() && ours == own, "{section} {field}: {ours}, not {own}");
        }
    }
}

#[test]
fn other_programs_read_the_boot_program() {
    let place = place();
    if testing::program(STUB).is_none() {
        return;
    }
    std::fs::create_dir_all(place.path("tree/usr/lib")).unwrap();
    write(&place.path("tree/usr/lib/os-release"), b"ID=test\n", 0o644);
    place.out("import --quiet dir:tree a");
    write(&place.path("kernel"), &kernel(), 0o644);
    write(&place.path("first"), b"abc", 0o644);
    write(&place.path("second"), &[b'2'; 5000], 0o644);
    let export = |disk: &str| {
        let mut words: Vec<_> = BOOT.split(' ').collect();
        words.extend(["--cmdline", "quiet console=ttyS0", "--initrd", "first"]);
        words.extend(["--initrd", "second", disk]);
        let ran = place.run_each(&words);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        json(&ran.out)
    };
    let told = export("disk:a.disk");
    export("disk:b.disk");
    assert!(read(&place.path("a.disk")) == read(&place.path("b.disk")));
    let Some(partitions) = partitions(&place, "a.disk") else { return };
    assert_eq!(partitions.len(), 3);
    let esp = &partitions[2];
    assert_eq!(esp["type"], "C12A7328-F81F-11D2-BA4B-00A0C93EC93B");
    assert_eq!(esp["name"], "esp");
    ask(&place, "fsck.vfat", &["-n", "-v", "esp.partition"]);
    let words = ["-i", "esp.partition", "::/EFI/BOOT/BOOTX64.EFI", "boot.efi"];
    if ask(&place, "mcopy", &words).is_none() {
        return;
    }
    let root_hash = told["rootHash"].as_str().unwrap();
    let command_line = format!("roothash={root_hash} quiet console=ttyS0");
    ukify_makes_the_same(&place, &command_line);
    let initrd = [&b"abc\0"[..], &[b'2'; 5000]].concat();
    for (section, expect) in [
        (".osrel", &b"ID=test\n"[..]),
        (".cmdline", command_line.as_bytes()),
        (".uname", b"6.1.0-1"),
        (".initrd", &initrd),
        (".linux", &kernel()),
    ] {
        let dump = format!("{section}=section");
        let words = ["--dump-section", &dump, "boot.efi", "copy.efi"];
        if ask(&place, "objcopy", &words).is_none() {
            return;
        }
        // objcopy may dump the padding of the file as well.
        let found = read(&place.path("section"));
        let (content, padding) = found.split_at(expect.len());
        assert!(content == expect, "{section}");
        assert!(padding.len() < 4096 && padding.iter().all(|it| *it == 0), "{section}");
    }
}

#[test]
fn files_that_cannot_boot_leave_no_disk() {
    let place = place();
    let check = |line: &str, text: &str| {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.err);
        assert!(ran.err.contains(text), "{line}: {}", ran.err);
        assert!(!place.path("new").exists());
    };
    write(&place.path("stub"), b"MZ", 0o644);
    let line = format!("{} disk:new --stub stub", BOOT.replace("--json ", ""));
    check(&line, "cannot read kernel");
    write(&place.path("kernel"), b"", 0o644);
    check(&line, "the kernel is empty");
    write(&place.path("kernel"), b"kernel", 0o644);
    check(&line, "the stub cannot be used: it is not a program for UEFI");
    check(&format!("{line} --initrd absent"), "cannot read absent");
    check(&line.replace("amd64", "s390x"), "disks for s390x cannot boot");
    check(&format!("{line} --cmdline roothash=1"), "chooses the root");
    check("export --bootable a disk:new", "--kernel");
    check("export --kernel kernel a disk:new", "--bootable");
    check("export --bootable --kernel kernel a sysext:new", "--bootable needs disk:FILE");
    check("export --bootable --kernel kernel a disk:-", "--bootable needs a file");
}

#[test]
fn a_disk_with_a_tree_is_imported() {
    let place = place();
    place.out("export --quiet --platform linux/amd64 --verity a disk:a.disk");
    let ran = place.run("import disk:a.disk again");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("does not compare the disk's root with its hash tree"), "{}", ran.err);
    place.out("export --quiet --platform linux/amd64 a disk:plain.disk");
    assert!(!place.run("import disk:plain.disk plain").err.contains("hash tree"));
    let ran = place.run("diff a again");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), ""), "{}", ran.err);
}

#[test]
fn mistakes_leave_no_file() {
    let place = place();
    let cases = [
        ("export --verity a disk:-", "--verity needs a file"),
        ("export --verity a erofs:new", "--verity needs disk:FILE, sysext:FILE or confext:FILE"),
        ("export --verity a changes:new", "--verity needs disk:FILE"),
        ("export --private-key k --certificate c a tar:new", "--private-key needs disk:FILE"),
        ("export --private-key k a disk:new", "--certificate"),
        ("export --certificate c a disk:new", "--private-key"),
        ("export --platform linux/amd64 a sysext:new", "--platform needs --verity"),
        ("export --dax a sysext:new", "--dax needs erofs:FILE or disk:FILE"),
        ("export --dax --verity a disk:new", "--dax has no effect with a hash tree"),
        ("export --dax --private-key k --certificate c a disk:new", "--dax has no effect"),
        ("export --compression zstd a confext:new", "an extension cannot be compressed"),
    ];
    for (line, text) in cases {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.err);
        assert!(ran.err.contains(text), "{line}: {}", ran.err);
    }
    assert!(!place.path("new").exists());
}

/// An image `tools` with a release file for extensions of this name.
fn extension(place: &Place, folder: &str, release: &str) {
    let tree = place.path("extension");
    drop(std::fs::remove_dir_all(&tree));
    let directory = tree.join(folder).join("extension-release.d");
    std::fs::create_dir_all(&directory).unwrap();
    write(&directory.join("extension-release.tools"), release.as_bytes(), 0o644);
    write(&tree.join(folder).join("file"), b"content", 0o644);
    place.out("import --quiet dir:extension tools");
}

#[test]
fn extensions_are_images_that_hosts_take() {
    let place = Place::new();
    extension(&place, "usr/lib", "ID=debian\nVERSION_ID=13\n");
    let told = json(&place.out("export --json tools sysext:tools.raw"));
    let fields = ["name", "id", "version"].map(|it| told[it].as_str().unwrap());
    assert_eq!(fields, ["tools", "debian", "13"]);
    assert!(told["level"].is_null());
    assert!(told["rootHash"].is_null() && told["certificate"].is_null());
    place.out("export --quiet tools erofs:tools.erofs");
    assert!(read(&place.path("tools.raw")) == read(&place.path("tools.erofs")));
    let output = place.command(&["export", "tools", "sysext:-"]).output().unwrap();
    assert!(output.stdout == read(&place.path("tools.erofs")));
    // With a tree, it is a disk, whose partitions are those of a disk.
    place.out("export --quiet --platform linux/amd64 --verity tools disk:tools.disk");
    let line = "export --force --platform linux/amd64 --verity --json tools sysext:tools.raw";
    let told = json(&place.out(line));
    assert_eq!(told["rootHash"].as_str().unwrap().len(), 64);
    assert!(read(&place.path("tools.raw")) == read(&place.path("tools.disk")));
    // The directory of confexts is another one.
    let ran = place.run("export tools confext:other.raw");
    assert!(ran.err.contains("a confext extends only /etc, but the image has /usr"), "{}", ran.err);
    extension(&place, "etc", "ID=_any\n");
    let text = place.out("export --force tools confext:tools.raw");
    assert!(text.starts_with("extension tools for _any\n"), "{text}");
}

#[test]
fn extensions_that_hosts_refuse_leave_no_file() {
    let place = Place::new();
    let check = |target: &str, text: &str| {
        let ran = place.run(&format!("export tools {target}"));
        assert_eq!(ran.code, Some(2), "{text}: {}", ran.err);
        assert!(ran.err.contains(text), "{text}: {}", ran.err);
        assert!(!place.path("other.raw").exists());
    };
    extension(&place, "usr/lib", "ID=_any\n");
    check("sysext:other.raw", "name the file tools.raw");
    check("sysext:tools.img", "NAME.raw");
    extension(&place, "usr/lib", "VERSION_ID=13\n");
    check("sysext:tools.raw", "extension-release.tools has no ID");
    extension(&place, "usr/lib", &"#".repeat(70_000));
    check("sysext:tools.raw", "is not a regular file with at most 64 KiB of text");
    extension(&place, "usr/lib", "ID=_any\nARCHITECTURE=amd64\n");
    check("sysext:tools.raw", "ARCHITECTURE=amd64, which no host has");
    extension(&place, "usr/lib", "ID=_any\nARCHITECTURE=arm64\n");
    check("--verity --platform linux/amd64 sysext:tools.raw", "partitions are for amd64");
    extension(&place, "usr/lib", "ID=_any\nSYSEXT_SCOPE=host\n");
    check("sysext:tools.raw", "SYSEXT_SCOPE=host, but no program of systemd");
    extension(&place, "opt", "");
    check("sysext:tools.raw", "has no file /usr/lib/extension-release.d/extension-release.tools");
    assert!(!place.path("tools.raw").exists() && !place.path("tools.img").exists());
    extension(&place, "usr/lib", "ID=debian\n");
    let ran = place.run("export tools sysext:tools.raw");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("states no VERSION_ID of debian"), "{}", ran.err);
    extension(&place, "usr/lib", "ID=_any\nSYSEXT_SCOPE=initrd\n");
    let ran = place.run("export --force tools sysext:tools.raw");
    assert!(ran.err.contains("has only the scope \"initrd\""), "{}", ran.err);
}
