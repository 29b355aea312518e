//! Damages one line of a valid dump. The damage has a name, so that a difference shows which rule is affected.

use super::generate::Dump;
use rig::random::Random;

#[derive(Debug)]
pub(crate) struct Damaged {
    pub(crate) text: Vec<u8>,
    pub(crate) damage: Damage,
}

/// A kind of damage. Every writer accepts some of them, and the images must then be equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Damage {
    AnyByte,
    CutShort,
    NoLastNewline,
    EmptyLine,
    DoubledSpace,
    TrailingSpace,
    FieldMissing,
    FieldEmpty,
    FieldDash,
    Number,
    Mode,
    Mtime,
    Escape,
    RawNul,
    EscapedNul,
    LineTwice,
    LinesSwapped,
    LineMissing,
    PathComponent,
    LongName,
    SizeWrong,
    ContentTooLong,
    TargetTooLong,
    FileTooLarge,
    LinkToItself,
    LinkToNothing,
    LinkLoop,
    LinkToFolder,
    LinkIsFolder,
    Digest,
    Xattr,
    LargeXattrs,
    SecondRoot,
}

use Damage as D;

const ALL: [Damage; 33] = [
    D::AnyByte,
    D::CutShort,
    D::NoLastNewline,
    D::EmptyLine,
    D::DoubledSpace,
    D::TrailingSpace,
    D::FieldMissing,
    D::FieldEmpty,
    D::FieldDash,
    D::Number,
    D::Mode,
    D::Mtime,
    D::Escape,
    D::RawNul,
    D::EscapedNul,
    D::LineTwice,
    D::LinesSwapped,
    D::LineMissing,
    D::PathComponent,
    D::LongName,
    D::SizeWrong,
    D::ContentTooLong,
    D::TargetTooLong,
    D::FileTooLarge,
    D::LinkToItself,
    D::LinkToNothing,
    D::LinkLoop,
    D::LinkToFolder,
    D::LinkIsFolder,
    D::Digest,
    D::Xattr,
    D::LargeXattrs,
    D::SecondRoot,
];

pub(crate) fn damaged(dump: &Dump, random: &mut Random) -> Damaged {
    let damage = *random.pick(&ALL);
    let mut lines = dump.lines.clone();
    let at = random.size(0..=lines.len() - 1);
    let mut end: &[u8] = b"\n";
    let digest = "00".repeat(32);
    match damage {
        D::AnyByte => {
            let byte = random.size(0..=lines[at].len() - 1);
            lines[at][byte] = *random.pick(b"\0 \n\\-@=/.x0179a\xff");
        }
        D::CutShort => {
            let text = dump.text();
            let size = random.size(0..=text.len() - 1);
            return Damaged { text: text[..size].to_vec(), damage };
        }
        D::NoLastNewline => end = b"",
        D::EmptyLine => lines.insert(at, Vec::new()),
        D::DoubledSpace => {
            let spaces = positions(&lines[at], b' ');
            let place = *random.pick(&spaces);
            lines[at].insert(place, b' ');
        }
        D::TrailingSpace => lines[at].push(b' '),
        D::FieldMissing => {
            let count = random.size(0..=10);
            lines[at] = fields(&lines[at])[..count].join(&b' ');
        }
        D::FieldEmpty => set(&mut lines[at], random.size(0..=10), b""),
        D::FieldDash => set(&mut lines[at], random.size(0..=10), b"-"),
        D::Number => {
            let texts = [
                "x",
                "",
                "-1",
                "+1",
                "0x10",
                "1x",
                "1.5",
                "\t7",
                "18446744073709551615",
                "4294967296",
                "18446744073709551616",
                "99999999999999999999999",
                "-9223372036854775809",
                "007",
            ];
            set(&mut lines[at], *random.pick(&[1, 3, 4, 5, 6]), (*random.pick(&texts)).as_bytes());
        }
        D::Mode => {
            let texts = [
                "644",
                "170644",
                "100648",
                "0100644",
                "@100644",
                "@40755",
                "@",
                "100644@",
                "50755",
                "1100644",
                "4000100644",
                "-40755",
                "030000",
                "0",
                "@0",
            ];
            set(&mut lines[at], 2, (*random.pick(&texts)).as_bytes());
        }
        D::Mtime => {
            let texts = [
                "5",
                "5.",
                ".5",
                "",
                ".",
                "5.-1",
                "5.1000000000",
                "5.4294967296",
                "5.18446744073709551616",
                "-5.5",
                "+5.+5",
                "5.5.5",
                "9223372036854775808.0",
                "18446744073709551616.0",
                "-0.1",
                "0x5.0",
            ];
            set(&mut lines[at], 7, (*random.pick(&texts)).as_bytes());
        }
        D::Escape => {
            let texts: [&[u8]; 8] =
                [b"\\", b"\\x", b"\\x1", b"\\xg0", b"\\x0g", b"\\q", b"\\0", b"a\\xFf"];
            let text = *random.pick(&texts);
            match random.percent(50) {
                true => {
                    let path = [fields(&lines[at])[0], text].concat();
                    set(&mut lines[at], 0, &path);
                }
                false => lines[at].extend([b" user.k=", text].concat()),
            }
        }
        D::RawNul => {
            let place = random.size(0..=lines[at].len());
            lines[at].insert(place, 0);
        }
        D::EscapedNul => {
            let field = *random.pick(&[0, 8, 9, 10]);
            let text = [fields(&lines[at])[field], b"\\x00zz"].concat();
            set(&mut lines[at], field, &text);
        }
        D::LineTwice => lines.insert(random.size(at..=lines.len()), lines[at].clone()),
        D::LinesSwapped => {
            let other = random.size(0..=lines.len() - 1);
            lines.swap(at, other);
        }
        D::LineMissing => {
            lines.remove(at);
        }
        D::PathComponent => {
            let suffixes: [&[u8]; 9] = [
                b"/.",
                b"/..",
                b"/",
                b"//",
                b"/./x",
                b"/../x",
                b"//x",
                b"/nowhere/x",
                b"/\\x2e\\x2e",
            ];
            let path = [fields(&lines[at])[0], *random.pick(&suffixes)].concat();
            set(&mut lines[at], 0, &path);
        }
        D::LongName => {
            let name = "n".repeat(*random.pick(&[255, 256, 257, 4096]));
            lines.push(plain(&format!("/{name}"), "0", "100644", "-"));
        }
        D::SizeWrong => {
            let size = *random.pick(&["2", "4", "0", "3"]);
            let mut line = plain("/wrong-size", size, "100644", "-");
            set(&mut line, 9, b"abc");
            lines.push(line);
        }
        D::ContentTooLong => {
            let size = *random.pick(&[5000, 5001, 8192]);
            let mut line = plain("/long-content", &size.to_string(), "100644", "-");
            set(&mut line, 9, "c".repeat(size).as_bytes());
            lines.push(line);
        }
        D::TargetTooLong => {
            let size = *random.pick(&[4095, 4096, 5000]);
            lines.push(plain("/long-target", "0", "120777", &"t".repeat(size)));
        }
        D::FileTooLarge => {
            let sizes = [
                "9007199254740992",
                "9007199254740993",
                "9223372036854775807",
                "18446744073709551615",
            ];
            let size = *random.pick(&sizes);
            lines.push(plain("/large", size, "100644", "-"));
        }
        D::LinkToItself => lines.push(plain("/loop", "0", "@100644", "/loop")),
        D::LinkToNothing => lines.push(plain("/link", "0", "@100644", "/nothing/here")),
        D::LinkLoop => {
            lines.push(plain("/loop-a", "0", "@100644", "/loop-b"));
            lines.push(plain("/loop-b", "0", "@100644", "/loop-a"));
        }
        D::LinkToFolder => lines.push(plain("/link", "0", "@100644", "/")),
        D::LinkIsFolder => lines.push(plain("/link", "0", "@40755", "/")),
        D::Digest => {
            let texts: [&str; 6] = [
                "",
                "00",
                "-00",
                &digest[1..],
                &format!("{digest}00"),
                &format!("{}zz", &digest[2..]),
            ];
            let mut line = plain("/digest", "9", "100644", "aa/bb");
            set(&mut line, 10, (*random.pick(&texts)).as_bytes());
            lines.push(line);
        }
        D::Xattr => {
            let long = format!("user.{}=", "k".repeat(*random.pick(&[250, 251])));
            let value = format!("user.k={}", "v".repeat(*random.pick(&[32_700, 65_500, 65_536])));
            let texts =
                ["=v", "k", "k=", "k=v=w", "user.k", "user.k=a user.k=b", "-", &long, &value];
            lines[at].extend([b" ", (*random.pick(&texts)).as_bytes()].concat());
        }
        D::LargeXattrs => {
            // Around the limit of 32767 bytes per inode.
            for name in 0..4 {
                let value = "v".repeat(random.size(8_100..=8_200));
                lines[at].extend(format!(" user.{name}={value}").into_bytes());
            }
        }
        D::SecondRoot => lines.push(dump.lines[0].clone()),
    }
    let text = [lines.join(&b'\n').as_slice(), end].concat();
    Damaged { text, damage }
}

fn plain(path: &str, size: &str, mode: &str, payload: &str) -> Vec<u8> {
    format!("{path} {size} {mode} 1 0 0 0 0.0 {payload} - -").into_bytes()
}

fn fields(line: &[u8]) -> Vec<&[u8]> {
    line.split(|it| *it == b' ').collect()
}

fn set(line: &mut Vec<u8>, field: usize, text: &[u8]) {
    let mut all = fields(line);
    all[field] = text;
    *line = all.join(&b' ');
}

fn positions(line: &[u8], byte: u8) -> Vec<usize> {
    line.iter().enumerate().filter(|(_, it)| **it == byte).map(|(at, _)| at).collect()
}
