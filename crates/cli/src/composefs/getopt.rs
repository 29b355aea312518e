//! Parses options like GNU `getopt_long`: between and after other arguments, abbreviated, with the value after `=`
//! or in the next argument, until `--`.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

/// The options that a program accepts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spec {
    /// The letters of the short options, and whether each takes a value.
    pub(super) short: &'static [(u8, bool)],
    /// Names of the long options without dashes, and whether each takes a value.
    pub(super) long: &'static [(&'static str, bool)],
}

/// A parsed option with its value, which is empty if the option takes none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Given {
    Short(u8, OsString),
    Long(&'static str, OsString),
}

/// An invalid option. `Display` prints GNU's messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OptionError {
    Unknown(String),
    UnknownLetter(char),
    /// The abbreviation, and the names for which it may stand.
    Ambiguous(String, Vec<&'static str>),
    NoValue(&'static str),
    NoLetterValue(char),
    Value(&'static str),
}

impl fmt::Display for OptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(option) => write!(f, "unrecognized option '{option}'"),
            Self::UnknownLetter(letter) => write!(f, "invalid option -- '{letter}'"),
            Self::Ambiguous(option, names) => {
                write!(f, "option '{option}' is ambiguous; possibilities:")?;
                names.iter().try_for_each(|name| write!(f, " '--{name}'"))
            }
            Self::NoValue(name) => write!(f, "option '--{name}' requires an argument"),
            Self::NoLetterValue(letter) => {
                write!(f, "option requires an argument -- '{letter}'")
            }
            Self::Value(name) => write!(f, "option '--{name}' doesn't allow an argument"),
        }
    }
}

/// Parses arguments one by one: returns the options and collects the other arguments.
#[derive(Debug)]
pub(super) struct Options<I> {
    spec: Spec,
    arguments: I,
    /// Remaining letters of a group of short options after one dash.
    letters: Vec<u8>,
    others: Vec<OsString>,
}

impl<I: Iterator<Item = OsString>> Options<I> {
    pub(super) fn new(spec: Spec, arguments: I) -> Self {
        Self { spec, arguments, letters: Vec::new(), others: Vec::new() }
    }

    /// Returns the next option. After `None`, see [`others`](Self::others).
    pub(super) fn next(&mut self) -> Result<Option<Given>, OptionError> {
        if !self.letters.is_empty() {
            return self.letter().map(Some);
        }
        loop {
            let Some(argument) = self.arguments.next() else { return Ok(None) };
            match argument.as_bytes() {
                b"--" => {
                    self.others.extend(&mut self.arguments);
                    return Ok(None);
                }
                [b'-', b'-', name @ ..] if !self.spec.long.is_empty() => {
                    return self.long(name).map(Some);
                }
                [b'-', letters @ ..] if !letters.is_empty() => {
                    self.letters = letters.to_vec();
                    return self.letter().map(Some);
                }
                _ => self.others.push(argument),
            }
        }
    }

    /// Returns the arguments that are not options, in order.
    pub(super) fn others(self) -> Vec<OsString> {
        self.others
    }

    fn long(&mut self, argument: &[u8]) -> Result<Given, OptionError> {
        let shown = || format!("--{}", String::from_utf8_lossy(argument));
        let mut parts = argument.splitn(2, |byte| *byte == b'=');
        let name = parts.next().unwrap_or_default();
        let value = parts.next().map(|value| OsString::from_vec(value.to_vec()));
        let all = self.spec.long.iter();
        let fitting: Vec<_> = all.filter(|(it, _)| it.as_bytes().starts_with(name)).collect();
        let exact = fitting.iter().find(|(it, _)| it.as_bytes() == name);
        let &(name, takes_value) = match (exact, &fitting[..]) {
            (Some(found), _) | (None, [found]) => *found,
            (None, []) => return Err(OptionError::Unknown(shown())),
            (None, several) => {
                let names = several.iter().map(|(name, _)| *name).collect();
                return Err(OptionError::Ambiguous(shown(), names));
            }
        };
        let value = match (takes_value, value) {
            (false, None) => OsString::new(),
            (false, Some(_)) => return Err(OptionError::Value(name)),
            (true, Some(value)) => value,
            (true, None) => self.arguments.next().ok_or(OptionError::NoValue(name))?,
        };
        Ok(Given::Long(name, value))
    }

    fn letter(&mut self) -> Result<Given, OptionError> {
        let letter = self.letters.remove(0);
        let known = self.spec.short.iter().find(|(it, _)| *it == letter && letter != b':');
        let Some(&(_, takes_value)) = known else {
            // Drop the remaining letters, because the caller stops at the error.
            self.letters.clear();
            return Err(OptionError::UnknownLetter(letter.into()));
        };
        let value = if !takes_value {
            OsString::new()
        } else if self.letters.is_empty() {
            self.arguments.next().ok_or(OptionError::NoLetterValue(letter.into()))?
        } else {
            OsString::from_vec(std::mem::take(&mut self.letters))
        };
        Ok(Given::Short(letter, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: Spec = Spec {
        short: &[(b'h', false), (b'o', true)],
        long: &[("skip-devices", false), ("skip-xattrs", false), ("min", true), ("minimum", true)],
    };

    /// `expect` has the options as `name` or `name=value`, then `|`, then the other arguments; or the first error.
    fn check(spec: Spec, arguments: &str, expect: &str) {
        let mut options = Options::new(spec, arguments.split_whitespace().map(OsString::from));
        let mut found = Vec::new();
        loop {
            match options.next() {
                Ok(Some(Given::Short(letter, value))) => {
                    found.push(format!("{}={}", char::from(letter), value.display()));
                }
                Ok(Some(Given::Long(name, value))) => {
                    found.push(format!("{name}={}", value.display()));
                }
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(error.to_string(), expect, "{arguments}");
                    return;
                }
            }
        }
        found.push("|".to_owned());
        found.extend(options.others().iter().map(|it| it.display().to_string()));
        assert_eq!(found.join(" "), expect, "{arguments}");
    }

    #[test]
    fn as_gnu_getopt_long() {
        check(SPEC, "", "|");
        check(SPEC, "a --skip-x b", "skip-xattrs= | a b");
        check(SPEC, "a -ho5 b -o 6", "h= o=5 o=6 | a b");
        check(SPEC, "--min=3 --minimum 4 --mini=5 --min= x", "min=3 minimum=4 minimum=5 min= | x");
        check(SPEC, "--min -h a", "min=-h | a");
        check(SPEC, "-h -- -o --min - a", "h= | -o --min - a");
        check(SPEC, "- a -", "| - a -");
        check(
            SPEC,
            "--skip",
            "option '--skip' is ambiguous; possibilities: '--skip-devices' '--skip-xattrs'",
        );
        check(SPEC, "--skip-d=1", "option '--skip-devices' doesn't allow an argument");
        check(SPEC, "--nope=1 a", "unrecognized option '--nope=1'");
        check(SPEC, "a --min", "option '--min' requires an argument");
        check(SPEC, "-o", "option requires an argument -- 'o'");
        check(SPEC, "-hx", "invalid option -- 'x'");
        let short = Spec { long: &[], ..SPEC };
        check(short, "--help", "invalid option -- '-'");
    }
}
