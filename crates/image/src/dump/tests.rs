//! Tests whose expected values come from composefs 1.0.8: acceptance from `mkcomposefs --from-file`, and the meaning
//! from `composefs-info dump` of the image. If Quire differs deliberately, the row states this.

use std::io::BufReader;

use super::*;
use crate::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, Timestamp, Tree};
use crate::verity::{Algorithm, digest};

mod properties;

const ROOT: &str = "/ 0 40755 2 0 0 0 0.0 - - -\n";

/// Writes a tree with [`write`], like `composefs-info dump`.
fn text(tree: &Tree, links: Links) -> String {
    let mut out = Vec::new();
    write(tree, links, directory_size, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn reason(error: ParseError) -> (u64, String) {
    match error {
        ParseError::Line { line, source } => (line, source.to_string()),
        other => (0, other.to_string()),
    }
}

/// Parses `lines` after a root, and expects `Ok` with the dump's lines without the root's, or `Err("LINE: REASON")`.
fn check_as(strictness: Strictness, lines: &str, expect: Result<&str, &str>) {
    let input = format!("{ROOT}{lines}");
    let found = parse(input.as_bytes(), strictness);
    let found = match found {
        Ok(tree) => Ok(text(&tree, Links::ToFirst).split_once('\n').unwrap().1.to_owned()),
        Err(error) => {
            let (line, reason) = reason(error);
            Err(format!("{line}: {reason}"))
        }
    };
    let shown = &lines[..lines.len().min(100)];
    assert_eq!(found.as_deref().map_err(String::as_str), expect, "{shown}");
}

fn check(line: &str, expect: Result<&str, &str>) {
    check_as(
        Strictness::Lenient,
        &format!("{line}\n"),
        match expect {
            Ok(found) => Ok(found),
            Err(error) => Err(error),
        },
    );
}

fn same(line: &str) {
    check(line, Ok(&format!("{line}\n")));
}

/// Checks a line whose meaning `mkcomposefs` changes: lenient parsing gives `taken`, and exact parsing fails with
/// `reason`.
fn check_exact(line: &str, taken: &str, reason: &str) {
    let (line, taken) = (format!("{line}\n"), format!("{taken}\n"));
    check_as(Strictness::Lenient, &line, Ok(&taken));
    check_as(Strictness::Exact, &line, Err(&format!("2: {reason}")));
    check_as(Strictness::Exact, &taken, Ok(&taken));
}

#[test]
fn what_wraps_or_is_cut_is_refused_where_it_must_be_exact() {
    let word = "which is not from 0 to 4294967295";
    for (lines, field) in [
        (["1 4294967296 0", "1 0 0"], "UID"),
        (["1 0 4294967297", "1 0 1"], "GID"),
        (["4294967297 0 0", "1 0 0"], "NLINK"),
    ] {
        let [line, taken] = lines.map(|it| format!("/f 0 100644 {it} 0 0.0 - - -"));
        let number = lines[0].split(' ').find(|it| it.len() > 1).unwrap();
        check_exact(&line, &taken, &format!("{field} has the number \"{number}\", {word}"));
    }
    check_exact(
        "/f 0 100644 1 -1 0 0 0.0 - - -",
        "/f 0 100644 1 4294967295 0 0 0.0 - - -",
        &format!("UID has the number \"-1\", {word}"),
    );
    check_exact(
        "/f 0 100644 1 0 99999999999999999999999999999999999999999 0 0.0 - - -",
        "/f 0 100644 1 0 4294967295 0 0.0 - - -",
        &format!("GID has the number \"99999999999999999999999999999999999999999\", {word}"),
    );
    check_exact(
        "/f 0 20644 1 0 0 4294967553 0.0 - - -",
        "/f 0 20644 1 0 0 257 0.0 - - -",
        &format!("RDEV has the number \"4294967553\", {word}"),
    );
    check_exact(
        "/f 0 1100644 1 0 0 0 0.0 - - -",
        "/f 0 100644 1 0 0 0 0.0 - - -",
        "MODE has the number \"1100644\", which is not from 0 to 65535",
    );
    check_exact(
        "/f 0 100644 1 0 0 0 9223372036854775808.0 - - -",
        "/f 0 100644 1 0 0 0 -9223372036854775808.0 - - -",
        "MTIME has the number \"9223372036854775808\", which is not from -9223372036854775808 to 9223372036854775807",
    );
    let nanoseconds = "which is not from 0 to 999999999";
    check_as(
        Strictness::Exact,
        "/f 0 100644 1 0 0 0 0.9999999999 - - -\n",
        Err(&format!("2: MTIME has the number \"9999999999\", {nanoseconds}")),
    );
    check_as(
        Strictness::Exact,
        "/f 0 100644 1 0 0 0 0.1000000000 - - -\n",
        Err(&format!("2: MTIME has the number \"1000000000\", {nanoseconds}")),
    );
    check_exact(
        "/n\\x00evil 0 100644 1 0 0 0 0.0 - - -",
        "/n 0 100644 1 0 0 0 0.0 - - -",
        "a name in PATH contains a NUL byte",
    );
    check_exact(
        "/s 1 120777 1 0 0 0 0.0 t\\x00u - -",
        "/s 1 120777 1 0 0 0 0.0 t - -",
        "a name in PAYLOAD contains a NUL byte",
    );
    check_exact(
        "/f 0 100644 1 0 0 0 0.0 - - - user.a\\x00b=c",
        "/f 0 100644 1 0 0 0 0.0 - - - user.a=c",
        "a name in the xattrs contains a NUL byte",
    );
    // Unusual values with a clear meaning are accepted: signs, blanks, zeros, times before 1970, and a NUL in a
    // value.
    for line in [
        "/f 0 100644 \t+1 00 4294967295 0 -9223372036854775808.999999999 - - -",
        "/f 1 100644 1 0 0 0 -1.0 - \\x00 - user.a=\\x00",
    ] {
        let text = format!("{ROOT}{line}\n");
        let taken = parse(text.as_bytes(), Strictness::Lenient).unwrap();
        let exact = parse(text.as_bytes(), Strictness::Exact).unwrap();
        assert_eq!(self::text(&exact, Links::ToFirst), self::text(&taken, Links::ToFirst));
    }
}

#[test]
fn paths() {
    same("/f 0 100644 1 0 0 0 0.0 - - -");
    let found = Ok("/f 0 100644 1 0 0 0 0.0 - - -\n");
    check("f 0 100644 1 0 0 0 0.0 - - -", found);
    check("//f 0 100644 1 0 0 0 0.0 - - -", found);
    check(r"/f\x00g 0 100644 1 0 0 0 0.0 - - -", found);
    same(r"/f\r\t\n\\ 1 100644 1 0 0 0 5.1 - - -");
    same(&format!("/{} 0 100644 1 0 0 0 0.0 - - -", "a".repeat(255)));
    check(
        &format!("/{} 0 100644 1 0 0 0 0.0 - - -", "a".repeat(256)),
        Err(&format!("2: \"{}\" is not a file name: it has more than 255 bytes", "a".repeat(256))),
    );
    for (path, why) in [
        ("", "the path is empty"),
        (r"\x00a", "the path is empty"),
        ("/", "\"/\" already exists"),
        ("//", "\"\" is not a file name: it is empty"),
        ("/.", "\".\" is not a file name: it is reserved for a directory"),
        ("/..", "\"..\" is not a file name: it is reserved for a directory"),
        ("/f/", "the directory of \"/f/\" is missing: it must come first"),
        ("/x/f", "the directory of \"/x/f\" is missing: it must come first"),
        (r"/f\x2fg", "the directory of \"/f/g\" is missing: it must come first"),
        ("/./f", "the directory of \"/./f\" is missing: it must come first"),
        (r"/f\q", r#"PATH has the unknown escape "\\q""#),
    ] {
        check(&format!("{path} 0 100644 1 0 0 0 0.0 - - -"), Err(&format!("2: {why}")));
    }
    check("/f\0 0 100644 1 0 0 0 0.0 - - -", Err("2: byte 2 is NUL"));
    check("", Err("2: the path is empty"));
    check(" ", Err("2: the path is empty"));

    let directory = "/d 0 40755 2 0 0 0 0.0 - - -\n";
    let file = " 1 100644 1 0 0 0 0.0 - - -";
    let both = "/d 40 40755 2 0 0 0 0.0 - - -\n/d/f 1 100644 1 0 0 0 0.0 - - -\n";
    for path in ["/d/f", "d/f", "d//f", "//d//f"] {
        check(&format!("{directory}{path}{file}"), Ok(both));
    }
    let missing = "is missing: it must come first";
    for path in ["/d/./f", "/d/../f", "/e/f"] {
        check(
            &format!("{directory}{path}{file}"),
            Err(&format!("3: the directory of \"{path}\" {missing}")),
        );
    }
    check(&format!("{directory}/d/{file}"), Err("3: \"\" is not a file name: it is empty"));
    check(&format!("/f{file}\n/f{file}"), Err("3: \"f\" already exists"));
    check(&format!("/f{file}\n/f/g{file}"), Err("3: the parent of \"/f/g\" is not a directory"));
}

#[test]
fn the_parent_of_a_line_is_found_wherever_the_line_before_was() {
    let mut dump = ROOT.to_owned();
    let directories = ["/a", "/a/b", "/a/b/c", "/a/bb", "/ab", "/a/b/cc", "/ab/c", "/a/b/c/d"];
    for path in directories {
        dump += &format!("{path} 0 40755 2 0 0 0 0.0 - - -\n");
    }
    let paths: Vec<String> = directories
        .iter()
        .flat_map(|one| directories.iter().map(move |other| (one, other)))
        .flat_map(|(one, other)| {
            let name = format!("{one}-{other}").replace('/', "_");
            [format!("{one}/1{name}"), format!("{}/2{name}", other.replace('/', "//"))]
        })
        .collect();
    for path in &paths {
        dump += &format!("{path} 0 100644 1 0 0 0 0.0 - - -\n");
    }
    let tree = parse(dump.as_bytes(), Strictness::Strict).unwrap();
    for path in &paths {
        assert!(tree.resolve(path.as_bytes()).is_some(), "{path}");
    }
    assert_eq!(tree.inode_count(), 1 + directories.len() + paths.len());
}

#[test]
fn numbers() {
    let plain = Ok("/f 1 100644 1 0 0 0 0.0 - - -\n");
    for size in ["+1", "\t1", "1"] {
        check(&format!("/f {size} 100644 1 0 0 0 0.0 - - -"), plain);
    }
    for mode in ["0100644", "200100644", "40000000000100644", "\x0b\x0c\r100644"] {
        check(&format!("/f 1 {mode} 1 0 0 0 0.0 - - -"), plain);
    }
    check("/f 1 -77644 1 0 0 0 0.0 - - -", Ok("/f 1 100134 1 0 0 0 0.0 - - -\n"));
    check("/f -1 10644 1 0 0 0 0.0 - - -", Ok("/f 0 10644 1 0 0 0 0.0 - - -\n"));
    check("/f 1 100644 -1 0 0 0 0.0 - - -", Ok("/f 1 100644 4294967295 0 0 0 0.0 - - -\n"));
    check("/f 1 100644 4294967297 0 0 0 0.0 - - -", plain);
    check(
        "/f 1 100644 1 4294967297 -2 0 0.0 - - -",
        Ok("/f 1 100644 1 1 4294967294 0 0.0 - - -\n"),
    );
    check("/f 1 100644 1 0 0 77 0.0 - - -", plain);
    check("/f 1 20644 1 0 0 -1 0.0 - - -", Ok("/f 0 20644 1 0 0 4294967295 0.0 - - -\n"));
    check("/f 1 60644 1 0 0 4294967297 0.0 - - -", Ok("/f 0 60644 1 0 0 1 0.0 - - -\n"));
    for (mtime, found) in [
        ("-5.3", "-5.3"),
        ("5.-1", "5.4294967295"),
        ("5.4294967296", "5.0"),
        ("5.9999999999999999999999", "5.4294967295"),
        ("9223372036854775808.1", "-9223372036854775808.1"),
        ("18446744073709551616.1", "-1.1"),
        ("\t5.\t3", "5.3"),
    ] {
        check(
            &format!("/f 1 100644 1 0 0 0 {mtime} - - -"),
            Ok(&format!("/f 1 100644 1 0 0 0 {found} - - -\n")),
        );
    }

    for (line, why) in [
        ("1x 100644 1 0 0 0 0.0 - - -", "SIZE is \"1x\", which is not a number"),
        ("- 100644 1 0 0 0 0.0 - - -", "SIZE is \"-\", which is not a number"),
        ("0x1 100644 1 0 0 0 0.0 - - -", "SIZE is \"0x1\", which is not a number"),
        ("1 100648 1 0 0 0 0.0 - - -", "MODE is \"100648\", which is not an octal number"),
        ("1 @ 1 0 0 0 0.0 - - -", "MODE is \"\", which is not an octal number"),
        ("1 644 1 0 0 0 0.0 - - -", "mode 644 has no file type"),
        ("1 100644  0 0 0 0.0 - - -", "NLINK is \"\", which is not a number"),
        ("1 100644 1 0 x 0 0.0 - - -", "GID is \"x\", which is not a number"),
        ("1 100644 1 0 0 x 0.0 - - -", "RDEV is \"x\", which is not a number"),
        // `mkcomposefs` does not check these two if UID is not 0.
        ("1 100644 1 1 x 0 0.0 - - -", "GID is \"x\", which is not a number"),
        ("1 100644 1 1 0 x 0.0 - - -", "RDEV is \"x\", which is not a number"),
        ("1 100644 1 0 0 0 5 - - -", "MTIME is \"5\", which is not SECONDS.NANOSECONDS"),
        ("1 100644 1 0 0 0 5. - - -", "MTIME is \"\", which is not a number"),
        ("1 100644 1 0 0 0 .5 - - -", "MTIME is \"\", which is not a number"),
        ("1 100644 1 0 0 0 5.1.2 - - -", "MTIME is \"1.2\", which is not a number"),
    ] {
        check(&format!("/f {line}"), Err(&format!("2: {why}")));
    }
    // `mkcomposefs` overflows 64 bits and writes an image that no kernel can read.
    check(
        "/f -1 100644 1 0 0 0 0.0 - - -",
        Err("2: a file cannot have 18446744073709551615 bytes"),
    );
}

#[test]
fn lines_that_end_early() {
    let empty = Ok("/f 0 100644 1 0 0 0 0.0 - - -\n");
    for line in
        ["/f 0 100644 1 0 0 0 0.0", "/f 0 100644 1 0 0 0 0.0 ", "/f 0 100644 1 0 0 0 0.0 - -"]
    {
        check(line, empty);
    }
    for (line, field) in [
        ("/f", "MODE"),
        ("/f 1", "MODE"),
        ("/f 1 100644", "NLINK"),
        ("/f 1 100644 1 0 0", "RDEV"),
        ("/f 1 100644 1 0 0 0", "MTIME"),
        ("/f 5 100644 1 0 0 0 0.0 ab/cd", "CONTENT"),
        ("/f 5 10644 1 0 0 0 0.0 ab/cd", "CONTENT"),
        ("/f 5 40755 1 0 0 0 0.0 ab/cd", "CONTENT"),
    ] {
        check(line, Err(&format!("2: {field} is missing")));
    }
}

#[test]
fn contents() {
    const DIGEST: &str = "4f0a4b2d8e1a4b2d8e1a4b2d8e1a4b2d8e1a4b2d8e1a4b2d8e1a4b2d8e1a4b2d";
    let long = "ab".repeat(64);
    let plain = "/f 5 100644 1 0 0 0 0.0";
    same(&format!("{plain} ab/cd - -"));
    same(&format!("{plain} ab/cd - {DIGEST}"));
    same(&format!("{plain} - - {DIGEST}"));
    same(&format!("{plain} 4f/{} - {DIGEST}", &DIGEST[2..]));
    same(&format!("{plain} 4F/{} - {DIGEST}", &DIGEST[2..]));
    // `mkcomposefs` cuts a longer digest at 64 digits; this one is a SHA-512 digest.
    same(&format!("{plain} - - {long}"));
    check(
        &format!("{plain} - - {}", DIGEST.to_uppercase()),
        Ok(&format!("{plain} - - {DIGEST}\n")),
    );
    check(&format!("{plain} - - \\x34{}", &DIGEST[1..]), Ok(&format!("{plain} - - {DIGEST}\n")));
    same(r"/f 1 100644 1 0 0 0 5.1 \x2d - -");
    same(r"/f 1 100644 1 0 0 0 5.1 - \x2d -");
    same(r"/f 2 100644 1 0 0 0 5.1 - \x00b -");
    same("/f 1 100644 1 0 0 0 5.1 .. - -");
    check(r"/f 1 100644 1 0 0 0 5.1 a\x00b - -", Ok("/f 1 100644 1 0 0 0 5.1 a - -\n"));
    check(r"/f 1 100644 1 0 0 0 5.1 \x00b - -", Ok("/f 1 100644 1 0 0 0 5.1 - - -\n"));
    check("/f 0 100644 1 0 0 0 0.0 ab/cd - zz", Ok("/f 0 100644 1 0 0 0 0.0 - - -\n"));
    check("/f 0 10644 1 0 0 0 0.0 ab/cd - zz", Ok("/f 0 10644 1 0 0 0 0.0 - - -\n"));
    check("/d 5 40755 1 0 0 0 0.0 - abcde -", Ok("/d 27 40755 2 0 0 0 0.0 - - -\n"));
    check("/f 5 10644 1 0 0 0 0.0 - abcde -", Ok("/f 0 10644 1 0 0 0 0.0 - - -\n"));
    check("/f 4 120644 1 0 0 0 0.0 tgt abcd -", Ok("/f 3 120644 1 0 0 0 0.0 tgt - -\n"));
    same(&format!("/f 5000 100644 1 0 0 0 0.0 - {} -", "a".repeat(5000)));
    check(
        &format!("/f 5000 100644 1 0 0 0 0.0 - {} -", r"\x41".repeat(5000)),
        Ok(&format!("/f 5000 100644 1 0 0 0 0.0 - {} -\n", "A".repeat(5000))),
    );
    same(&format!("/f 1 100644 1 0 0 0 0.0 {} - -", "a".repeat(4095)));

    let not_hex = "which is neither \"-\" nor 64 or 128 hexadecimal digits";
    for (line, why) in [
        ("5 100644 1 0 0 0 0.0 - abcd -", "CONTENT has 4 bytes, but SIZE is 5"),
        ("5 10644 1 0 0 0 0.0 - abcd -", "CONTENT has 4 bytes, but SIZE is 5"),
        ("5 40755 1 0 0 0 0.0 - abcd -", "CONTENT has 4 bytes, but SIZE is 5"),
        ("3 120644 1 0 0 0 0.0 tgt abcd -", "CONTENT has 4 bytes, but SIZE is 3"),
        (r"1 100644 1 0 0 0 0.0 a\q - -", r#"PAYLOAD has the unknown escape "\\q""#),
        (r"1 100644 1 0 0 0 0.0 - \ -", r#"CONTENT has the unknown escape "\\""#),
        // For these digests, `mkcomposefs` uses uninitialised memory.
        ("5 100644 1 0 0 0 0.0 ab -", &format!("DIGEST is \"\", {not_hex}")),
        ("5 100644 1 0 0 0 0.0 ab - zz", &format!("DIGEST is \"zz\", {not_hex}")),
        ("5 100644 1 0 0 0 0.0 ab - 00", &format!("DIGEST is \"00\", {not_hex}")),
        (
            "0 120644 1 0 0 0 0.0 - - -",
            "a symlink's target must have 1 to 4095 bytes and no NUL; this one has 0",
        ),
        (
            r"0 120644 1 0 0 0 0.0 \x00a - -",
            "a symlink's target must have 1 to 4095 bytes and no NUL; this one has 0",
        ),
    ] {
        check(&format!("/f {line}"), Err(&format!("2: {why}")));
    }
    check(
        &format!("/f 5001 10644 1 0 0 0 0.0 - {} -", "a".repeat(5001)),
        Err("2: CONTENT has 5001 bytes, more than 5000"),
    );
    for kind in ["100644", "10644", "120777"] {
        check(
            &format!("/f 1 {kind} 1 0 0 0 0.0 {} - -", "a".repeat(4096)),
            Err("2: PAYLOAD has 4096 bytes, more than 4095"),
        );
    }
}

#[test]
fn xattrs() {
    let plain = "/f 1 100644 1 0 0 0 5.1 - - -";
    for (xattrs, found) in [
        ("", ""),
        (" ", ""),
        (" a=b", " a=b"),
        (" a=b ", " a=b"),
        (" b=1 a=2", " b=1 a=2"),
        (" a=b a=c", " a=c"),
        (" a=", " a="),
        (" a=b=c", r" a=b\x3dc"),
        (r" a\x3dd=b=c", r" a\x3dd=b\x3dc"),
        (r" a\x00d=b\x00c", r" a=b\x00c"),
    ] {
        check(&format!("{plain}{xattrs}"), Ok(&format!("{plain}{found}\n")));
    }
    let none = "\"\" is not an xattr name: it must have 1 to 255 bytes and no NUL";
    for (xattrs, why) in [
        (" a", "the xattr \"a\" has no \"=\""),
        ("  a=b", "the xattr \"\" has no \"=\""),
        (" a=b  c=d", "the xattr \"\" has no \"=\""),
        ("  ", "the xattr \"\" has no \"=\""),
        (" =a", none),
        (r" \x00d=b", none),
        (r" a\q=b", r#"the xattrs has the unknown escape "\\q""#),
        (r" a=\x4", r#"the xattrs has the unknown escape "\\x4""#),
    ] {
        check(&format!("{plain}{xattrs}"), Err(&format!("2: {why}")));
    }
    same(&format!("{plain} {}=", "a".repeat(255)));
    check(
        &format!("{plain} {}=", "a".repeat(256)),
        Err(&format!("2: \"{}{}", "a".repeat(256), &none[1..])),
    );
    same(&format!("{plain} a={}", "b".repeat(32747)));
    let many = "the xattrs take more than 32767 bytes in an image";
    check(&format!("{plain} a={}", "b".repeat(32748)), Err(&format!("2: {many}")));
    let twice =
        |one, other| format!("{plain} {one}={} {other}={}", "b".repeat(20000), "c".repeat(20000));
    check(&twice("a", "a"), Ok(&format!("{plain} a={}\n", "c".repeat(20000))));
    check(&twice("a", "b"), Err(&format!("2: {many}")));
    // The limit of 65535 applies to the escaped length.
    let escaped = r"\x41".repeat(16380);
    check(
        &format!("{plain} a={escaped}bbb {}", "c=".repeat(4)),
        Ok(&format!("{plain} a={}bbb c=c\\x3dc\\x3dc\\x3d\n", "A".repeat(16380))),
    );
    check(
        &format!("{plain} a={escaped}bbb {}", "c=".repeat(5)),
        Err("2: the xattrs take 65536 bytes of the line, more than 65535"),
    );
}

#[test]
fn hard_links() {
    const FILE: &str = "/f 1 100644 1 0 0 0 0.0 - - -";
    const LINKED: &str = "/f 1 100644 1 0 0 0 0.0 - - -\n/g 1 @100644 1 0 0 0 0.0 /f - -\n";
    for target in ["/f", "f", "//f", "/f/", r"/f\x00x", r"\x66"] {
        check(&format!("/g 1 @100644 1 0 0 0 0.0 {target} - -\n{FILE}"), Ok(LINKED));
    }
    check(&format!("{FILE}\n/g 1 @100644 1 0 0 0 0.0 /f - -"), Ok(LINKED));
    // Only the path, the mode and the target are parsed.
    check(&format!("/g x @120777 x x x x x /f \\q \\q nonsense\n{FILE}"), Ok(LINKED));
    check(
        &format!(
            "/g 1 @100644 1 0 0 0 0.0 /h - -\n/h 1 @100644 1 0 0 0 0.0 /i - -\n/i 1 @100644 1 0 0 0 0.0 /f - -\n{FILE}"
        ),
        Ok(&format!("{LINKED}/h 1 @100644 1 0 0 0 0.0 /f - -\n/i 1 @100644 1 0 0 0 0.0 /f - -\n")),
    );
    let link = |path: &str, target: &str| format!("{path} 1 @100644 1 0 0 0 0.0 {target} - -\n");
    let directory = "cannot be hard linked";
    for (lines, why) in [
        (link("/g", "/g"), "2: the hard link leads back to itself"),
        (link("/g", "g"), "2: the hard link leads back to itself"),
        (link("/g", "/h") + &link("/h", "/g"), "2: the hard link leads back to itself"),
        (
            link("/f", "/g") + &link("/g", "/h") + &link("/h", "/g"),
            "2: the hard link leads back to itself",
        ),
        (link("/g", "/n"), "2: the target of the hard link, \"/n\", is not in the dump"),
        (
            link("/g", "/h") + &link("/h", "/n"),
            "2: the target of the hard link, \"/n\", is not in the dump",
        ),
        (link("/g", "/./f") + FILE, "2: the target of the hard link, \"/./f\", is not in the dump"),
        (link("/g", "-"), "2: the hard link has no target"),
        (link("/g", "/f\\q"), r#"2: PAYLOAD has the unknown escape "\\q""#),
        ("/g @100644\n".to_owned(), "2: MODE is missing"),
        ("/g 1 @40755 1 0 0 0 0.0 /f - -\n".to_owned(), &format!("2: a directory {directory}")),
        ("/g 1 @644 1 0 0 0 0.0 /f - -\n".to_owned(), "2: mode 644 has no file type"),
        (
            "/g 1 @@100644 1 0 0 0 0.0 /f - -\n".to_owned(),
            "2: MODE is \"@100644\", which is not an octal number",
        ),
        (link("/g", "/h") + &link("/g", "/h"), "3: \"g\" already exists"),
        (link("/f", "/h") + FILE, "3: \"f\" already exists"),
        (format!("{FILE}\n") + &link("/f", "/h"), "3: \"f\" already exists"),
        (
            link("/f", "/h") + "/f/x 0 100644 1 0 0 0 0.0 - - -\n",
            "3: the parent of \"/f/x\" is not a directory",
        ),
        (link("/..", "/h"), "2: \"..\" is not a file name: it is reserved for a directory"),
        // `mkcomposefs` accepts these lines, but the kernel reports the resulting image as corrupt.
        (link("/g", "/"), &format!("2: a directory {directory}")),
        (
            "/d 0 40755 2 0 0 0 0.0 - - -\n".to_owned() + &link("/g", "/d"),
            &format!("3: a directory {directory}"),
        ),
        ("/g 1 @100644\n".to_owned(), "2: the hard link has no target"),
    ] {
        check_as(Strictness::Lenient, &lines, Err(why));
    }
}

#[test]
fn the_name_without_at_owns_the_inode() {
    let dump = format!(
        "{ROOT}/a 1 @100644 1 0 0 0 0.0 /z - -\n/b 40 40755 2 0 0 0 0.0 - - -\n/b/z 1 @100644 1 0 0 0 0.0 /z - -\n\
         /z 1 100644 7 0 0 0 0.0 - x -\n"
    );
    let dump = dump.replace("/ 0 40755 2", "/ 4096 40755 3");
    let tree = parse(dump.as_bytes(), Strictness::Strict).unwrap();
    assert_eq!(tree.resolve(b"/a").unwrap().path(), b"/z");
    assert_eq!(
        text(&tree, Links::ToOwner),
        dump.replace("@100644 1 0 0 0 0.0 /z - -", "@100644 7 0 0 0 0.0 /z x -")
    );
    assert_eq!(
        text(&tree, Links::ToFirst).lines().nth(4).unwrap(),
        "/z 1 @100644 7 0 0 0 0.0 /a x -"
    );
}

#[test]
fn only_some_of_the_root() {
    let dump = format!(
        "{}/a 40 40755 2 0 0 0 0.0 - - -\n/a/f 1 100644 1 0 0 0 0.0 - x -\n/aa 1 @100644 1 0 0 0 0.0 /a/f x -\n\
         /b 40 40755 2 0 0 0 0.0 - - -\n/b/a 1 @100644 1 0 0 0 0.0 /a/f x -\n",
        ROOT.replace("/ 0 40755 2", "/ 4096 40755 4")
    );
    let tree = parse(dump.as_bytes(), Strictness::Strict).unwrap();
    let some = |names: &[&[u8]]| {
        let mut out = Vec::new();
        let is_kept = |name: &[u8]| names.contains(&name);
        write_some(&tree, Links::ToFirst, is_kept, directory_size, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let lines: Vec<&str> = dump.lines().collect();
    assert_eq!(some(&[]), format!("{}\n", lines[0]));
    assert_eq!(some(&[b"a"]), format!("{}\n{}\n{}\n", lines[0], lines[1], lines[2]));
    let first = "/aa 1 100644 1 0 0 0 0.0 - x -\n";
    let second = lines[5].replace("/a/f", "/aa");
    assert_eq!(some(&[b"aa", b"b"]), format!("{}\n{first}{}\n{second}\n", lines[0], lines[4]));
}

#[test]
fn many_links_in_the_worst_order_take_linear_time() {
    // A chain of links, and a long one that ends in a loop.
    const COUNT: usize = 50_000;
    let mut dump = ROOT.to_owned();
    for number in 0..COUNT {
        dump += &format!("/{number} 0 @100644 1 0 0 0 0.0 /{} - -\n", number + 1);
    }
    let whole = format!("{dump}/{COUNT} 0 100644 1 0 0 0 0.0 - - -\n");
    let tree = parse(whole.as_bytes(), Strictness::Lenient).unwrap();
    assert_eq!(tree.inode_count(), 2);
    let looped = format!("{dump}/{COUNT} 0 @100644 1 0 0 0 0.0 /7 - -\n");
    let error = parse(looped.as_bytes(), Strictness::Lenient).unwrap_err();
    assert_eq!(reason(error), (2, "the hard link leads back to itself".to_owned()));
}

#[test]
fn strict() {
    let newline = ROOT.trim_end();
    for (strictness, text, expect) in [
        (Strictness::Lenient, newline, Ok(())),
        (Strictness::Strict, newline, Err((1, "it does not end with a newline"))),
        (Strictness::Strict, ROOT, Ok(())),
    ] {
        let found = parse(text.as_bytes(), strictness).map(drop).map_err(reason);
        assert_eq!(found, expect.map_err(|(line, why)| (line, why.to_owned())), "{text}");
    }
    for (line, why) in [
        ("/f 0 100644 1 0 0 5 0.0 - - -", "RDEV is 5, but the entry is not a device"),
        (
            "/f 0 100644 1 7 0 4294967296 0.0 - - -",
            "RDEV is 4294967296, but the entry is not a device",
        ),
        ("/f 1 120777 1 0 0 0 0.0 ab - -", "SIZE is 1, but the symlink's target has 2 bytes"),
        (r"/f 2 120777 1 0 0 0 0.0 a\x00b - -", "SIZE is 2, but the symlink's target has 1 bytes"),
        ("/f 2 120777 1 0 0 0 0.0 ab xx -", "a symlink cannot have CONTENT"),
    ] {
        check_as(Strictness::Strict, &format!("{line}\n"), Err(&format!("2: {why}")));
        assert!(parse(format!("{ROOT}{line}").as_bytes(), Strictness::Lenient).is_ok(), "{line}");
    }
    for line in [
        "/f 0 20644 1 0 0 5 0.0 - - -\n",
        "/f 2 120777 1 0 0 0 0.0 ab - -\n",
        "/f 0 60644 1 0 0 5 0.0 - - -\n",
    ] {
        check_as(Strictness::Strict, line, Ok(line));
    }
    let link = "/f 1 100644 1 0 0 0 0.0 - - -\n/g 1 @100644 1 0 0 5 0.0 /f - -\n";
    check_as(Strictness::Strict, link, Ok(&link.replace(" 5 ", " 0 ")));
}

#[test]
fn roots() {
    for (text, expect) in [
        ("", Err((0, "the dump is empty: it has no line for \"/\""))),
        ("\n", Err((1, "the path is empty"))),
        ("/f 0 40755 2 0 0 0 0.0 - - -\n", Err((1, "the first entry is not \"/\""))),
        ("// 0 40755 2 0 0 0 0.0 - - -\n", Err((1, "the first entry is not \"/\""))),
        ("/ 0 100755 2 0 0 0 0.0 - - -\n", Err((1, "\"/\" is not a directory"))),
        ("/ 0 @100755 2 0 0 0 0.0 - - -\n", Err((1, "\"/\" is not a directory"))),
        ("/ 9 40555 7 1 2 0 3.4 - - - a=b\n", Ok("/ 4096 40555 2 1 2 0 3.4 - - - a=b\n")),
        ("\\x2f 0 40755 2 0 0 0 0.0 - - -\n", Ok("/ 4096 40755 2 0 0 0 0.0 - - -\n")),
        ("/\\x00a 0 40755 2 0 0 0 0.0 - - -\n", Ok("/ 4096 40755 2 0 0 0 0.0 - - -\n")),
    ] {
        let found = parse(text.as_bytes(), Strictness::Lenient);
        let found = found.map(|tree| super::tests::text(&tree, Links::ToFirst)).map_err(reason);
        let expect = expect.map(str::to_owned).map_err(|(line, why)| (line, why.to_owned()));
        assert_eq!(found, expect, "{text}");
    }
}

#[test]
fn the_input_comes_in_pieces_of_any_size() {
    let dump = format!(
        "{ROOT}/d 40 40755 2 0 0 0 0.0 - - -\n/d/f 5 100644 1 0 0 0 0.0 - hello -\n/d/g 0 100644 1 0 0 0 0.0 - - -"
    );
    let expect = text(&parse(dump.as_bytes(), Strictness::Lenient).unwrap(), Links::ToOwner);
    for size in 1..dump.len() {
        let input = BufReader::with_capacity(size, dump.as_bytes());
        let tree = parse(input, Strictness::Lenient).unwrap();
        assert_eq!(text(&tree, Links::ToOwner), expect, "{size}");
    }
}

#[test]
fn an_endless_line_is_refused_before_it_fills_the_memory() {
    use std::io::Read as _;
    let input = BufReader::new(std::io::repeat(b'a').take(1 << 40));
    let error = parse(input, Strictness::Lenient).unwrap_err();
    assert_eq!(reason(error), (1, "it has more than 16 MiB".to_owned()));
}

#[test]
fn an_input_that_fails_is_told_from_a_wrong_line() {
    struct Failing;
    impl std::io::Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("the disk is gone"))
        }
    }
    use std::io::Read as _;
    let input = BufReader::with_capacity(1, ROOT.as_bytes().chain(Failing));
    let error = parse(input, Strictness::Lenient).unwrap_err();
    assert_eq!(error.to_string(), "cannot read line 2 of the dump");
}

fn check_directory_size(names: &[&str], in_root: bool, expect: u64) {
    let mut dump = ROOT.to_owned();
    let directory = if in_root { "" } else { "/d" };
    if !in_root {
        dump += "/d 0 40755 2 0 0 0 0.0 - - -\n";
    }
    for name in names {
        dump += &format!("{directory}/{name} 0 100644 1 0 0 0 0.0 - - -\n");
    }
    let tree = parse(dump.as_bytes(), Strictness::Lenient).unwrap();
    let found = directory_size(tree.resolve(directory.as_bytes()).unwrap());
    assert_eq!(found, expect, "{names:?}");
}

#[test]
fn directory_sizes() {
    // Expected sizes are from `composefs-info dump`.
    check_directory_size(&[], false, 27);
    check_directory_size(&["f"], false, 40);
    check_directory_size(&[], true, 4096);
    check_directory_size(&["00"], true, 4096);
    let check_many = |count: u32, name: &dyn Fn(u32) -> String, in_root, expect| {
        let names: Vec<String> = (0..count).map(name).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        check_directory_size(&names, in_root, expect);
    };
    let long = |at| format!("{}{}", "a".repeat(240), char::from_u32(u32::from(b'A') + at).unwrap());
    for (count, expect) in
        [(7, 1798), (8, 4096), (15, 4096), (16, 4096), (17, 4349), (24, 6120), (25, 8192)]
    {
        check_many(count, &long, false, expect);
    }
    // These names are sorted before the dots.
    let early = |at| format!("!{}", &long(at)[1..]);
    for (count, expect) in [(1, 280), (16, 4096), (17, 4376)] {
        check_many(count, &early, false, expect);
    }
    let short = |at| format!("name{at:03}");
    for (count, expect) in [(20, 4096), (40, 4381), (200, 8192)] {
        check_many(count, &short, true, expect);
    }
}
