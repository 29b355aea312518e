//! Parses policy files.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::key::{KeyError, PublicKey};
use super::name::{Pattern, Repository};
use crate::Digest;

/// Maximum size of a policy or a key, in bytes. Larger files are given by mistake.
const FILE_MAX: u64 = 1 << 20;

/// An error of loading a policy file. Every image is then refused.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the policy {}", file.display())]
pub struct PolicyError {
    /// Path of the policy.
    pub file: PathBuf,
    /// The flaw.
    #[source]
    pub flaw: Flaw,
}

/// A flaw of a policy file. Lines are counted from 1.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Flaw {
    /// The file cannot be read.
    #[error("it cannot be read")]
    Read(#[source] std::io::Error),
    /// The file is not a regular file, or is too large.
    #[error("it is not a regular file of at most {FILE_MAX} bytes")]
    Odd,
    /// The file is not TOML.
    #[error("line {line}: {why}")]
    Syntax {
        /// Line of the error.
        line: usize,
        /// The parser's message.
        why: String,
    },
    /// A field is unknown, most often because of a typing error.
    #[error("line {line}: \"{}\" is not a field of {of}: did you mean \"{nearest}\"?", name.escape_debug())]
    Unknown {
        /// Line of the field.
        line: usize,
        /// Name of the field.
        name: String,
        /// Kind of table that contains the field.
        of: &'static str,
        /// Known field with the most similar name.
        nearest: &'static str,
    },
    /// A field has an invalid value.
    #[error("line {line}: {field} must be {expected}")]
    Value {
        /// Line of the value.
        line: usize,
        /// Name of the field.
        field: &'static str,
        /// Allowed values.
        expected: &'static str,
    },
    /// A required field is missing.
    #[error("line {line}: {of} needs {field}")]
    Missing {
        /// Line at which the table begins.
        line: usize,
        /// Kind of table.
        of: &'static str,
        /// Missing field, with an example.
        field: &'static str,
    },
    /// Fields contradict each other, or a pattern can match no repository.
    #[error("line {line}: {why}")]
    Senseless {
        /// Line of the rule or the pattern.
        line: usize,
        /// Description of the flaw.
        why: String,
    },
    /// A key file cannot be read.
    #[error("line {line}: the key {} cannot be read", key.display())]
    KeyRead {
        /// Line of the key.
        line: usize,
        /// Path of the key file.
        key: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// A file is not a usable key.
    #[error("line {line}: {} is not a key", key.display())]
    Key {
        /// Line of the key.
        line: usize,
        /// Path of the key file.
        key: PathBuf,
        /// Cause.
        source: KeyError,
    },
}

/// The decision about images that no rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Default {
    /// Accept all images that match.
    Any,
    /// Refuse all images that match.
    None,
}

/// The condition of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Accept {
    /// Accept every image.
    Any,
    /// Refuse every image.
    None,
    /// Require a signature by one of these keys, each with its file. The list is not empty.
    Signed(Vec<(PathBuf, PublicKey)>, Identity),
}

/// The repository that a signature must name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// The repository from which the image was pulled.
    Repository,
    /// Any repository, or none.
    Any,
    /// Exactly this repository.
    Named(Repository),
}

/// A rule of a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Line at which the rule begins, from 1.
    pub line: usize,
    /// Patterns of the images to which the rule applies. The list is not empty.
    pub patterns: Vec<Pattern>,
    /// Condition under which an image is accepted.
    pub accept: Accept,
    /// Accepted manifests, or indexes that list them. If the list is empty, any manifest is accepted.
    pub digests: Vec<Digest>,
}

/// A parsed policy file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Path of the file, for messages.
    pub file: PathBuf,
    /// Rules, in the order of the file.
    pub rules: Vec<Rule>,
    /// Decision about images that no rule matches.
    pub default: Default,
}

const POLICY: &str = "a policy";
const RULE: &str = "a rule";
const POLICY_FIELDS: [&str; 2] = ["default", "rule"];
const RULE_FIELDS: [&str; 5] = ["match", "accept", "digests", "keys", "identity"];

impl Policy {
    /// Loads the policy in a file, with its keys. `None` if the file does not exist. Any error makes the whole policy
    /// unusable.
    ///
    /// # Errors
    /// [`PolicyError`] if the file or one of its keys is unusable.
    pub fn load(file: &Path) -> Result<Option<Self>, PolicyError> {
        let failed = |flaw| PolicyError { file: file.to_owned(), flaw };
        let bytes = match read(file) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Err(failed(Flaw::Odd)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(Flaw::Read(error))),
        };
        let text = std::str::from_utf8(&bytes).map_err(|error| {
            let line = line_at(&bytes, error.valid_up_to());
            failed(Flaw::Syntax { line, why: "it is not UTF-8".to_owned() })
        })?;
        Self::parse(file, text).map(Some).map_err(failed)
    }

    fn parse(file: &Path, text: &str) -> Result<Self, Flaw> {
        let newlines = text.bytes().enumerate().filter(|it| it.1 == b'\n').map(|it| it.0).collect();
        let source = PolicyText { newlines, directory: file.parent().unwrap_or(Path::new("/")) };
        let document = DeTable::parse(text).map_err(|error| Flaw::Syntax {
            line: source.line(&error.span().unwrap_or_default()),
            why: error.message().to_owned(),
        })?;
        let fields = source.fields(document.get_ref(), POLICY, &POLICY_FIELDS)?;
        let missing = |field| Flaw::Missing { line: 1, of: POLICY, field };
        let default =
            fields.get("default").ok_or_else(|| missing("default = \"any\" or \"none\""))?;
        let default = match default.get_ref().as_str() {
            Some("any") => Default::Any,
            Some("none") => Default::None,
            _ => return Err(source.value(default, "default", "\"any\" or \"none\"")),
        };
        let mut rules = Vec::new();
        if let Some(list) = fields.get("rule") {
            let wrong = |it| source.value(it, "rule", "written as [[rule]]");
            for rule in list.get_ref().as_array().ok_or_else(|| wrong(list))?.iter() {
                let table = rule.get_ref().as_table().ok_or_else(|| wrong(rule))?;
                rules.push(source.rule(source.line(&rule.span()), table)?);
            }
        }
        Ok(Self { file: file.to_owned(), rules, default })
    }
}

/// Reads a small regular file. `None` if it is larger or has another type.
fn read(file: &Path) -> std::io::Result<Option<Vec<u8>>> {
    let file = crate::files::open(file)?;
    let found = file.metadata()?;
    if !found.is_file() || found.len() > FILE_MAX {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.take(FILE_MAX + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= FILE_MAX).then_some(bytes))
}

fn line_at(text: &[u8], offset: usize) -> usize {
    text.iter().take(offset).filter(|byte| **byte == b'\n').count() + 1
}

type Value<'i> = Spanned<DeValue<'i>>;
type Fields<'t, 'i> = BTreeMap<&'t str, &'t Value<'i>>;

struct PolicyText<'s> {
    /// Offsets of the line ends, in order.
    newlines: Vec<usize>,
    /// Directory to which relative paths of keys are relative.
    directory: &'s Path,
}

impl PolicyText<'_> {
    fn line(&self, span: &Range<usize>) -> usize {
        self.newlines.partition_point(|it| *it < span.start) + 1
    }

    fn value(&self, value: &Value<'_>, field: &'static str, expected: &'static str) -> Flaw {
        Flaw::Value { line: self.line(&value.span()), field, expected }
    }

    /// Returns a table's fields, which must all be known.
    fn fields<'t, 'i>(
        &self,
        table: &'t DeTable<'i>,
        of: &'static str,
        known: &'static [&'static str],
    ) -> Result<Fields<'t, 'i>, Flaw> {
        let mut fields = Fields::new();
        for (name, value) in table {
            let text: &str = name.get_ref();
            if !known.contains(&text) {
                let nearest = known.iter().min_by_key(|it| distance(it, text));
                let nearest = nearest.copied().unwrap_or_default();
                let line = self.line(&name.span());
                return Err(Flaw::Unknown { line, name: text.to_owned(), of, nearest });
            }
            fields.insert(text, value);
        }
        Ok(fields)
    }

    /// Returns the texts of a list, each with its line. A single text counts as a list. An empty list is an error.
    fn texts<'t>(
        &self,
        value: &'t Value<'_>,
        field: &'static str,
        expected: &'static str,
    ) -> Result<Vec<(usize, &'t str)>, Flaw> {
        let wrong = |it| self.value(it, field, expected);
        if let Some(text) = value.get_ref().as_str() {
            return Ok(vec![(self.line(&value.span()), text)]);
        }
        let list = value.get_ref().as_array().ok_or_else(|| wrong(value))?;
        if list.is_empty() {
            return Err(wrong(value));
        }
        let text = |it: &'t Value<'_>| {
            let text = it.get_ref().as_str().ok_or_else(|| wrong(it))?;
            Ok((self.line(&it.span()), text))
        };
        list.iter().map(text).collect()
    }

    fn rule(&self, line: usize, table: &DeTable<'_>) -> Result<Rule, Flaw> {
        let fields = self.fields(table, RULE, &RULE_FIELDS)?;
        let missing = |field| Flaw::Missing { line, of: RULE, field };
        let patterns = fields.get("match").ok_or_else(|| missing("match = \"REPOSITORY\""))?;
        let mut found = Vec::new();
        for (line, text) in
            self.texts(patterns, "match", "a repository, or a list of repositories")?
        {
            let senseless = |why| Flaw::Senseless { line, why };
            found.push(Pattern::parse(text).map_err(senseless)?);
        }
        let patterns = found;
        let digests = self.digests(fields.get("digests").copied())?;
        let expected = "\"any\", \"none\" or \"signed\"";
        let word = fields.get("accept");
        let word = word.ok_or_else(|| missing("accept = \"any\", \"none\" or \"signed\""))?;
        let accept = match word.get_ref().as_str() {
            Some("any") => Accept::Any,
            Some("none") => Accept::None,
            Some("signed") => {
                let keys = fields.get("keys");
                let keys = self.keys(keys.ok_or_else(|| missing("keys = [\"FILE\"]"))?)?;
                let identity = fields.get("identity").copied();
                let has_local = patterns.contains(&Pattern::Local);
                let identity = match self.identity(identity)? {
                    Some(Identity::Repository) if has_local => {
                        let why = "images made here come from no repository: write identity = \
                            \"any\", or the REGISTRY/REPOSITORY that signatures must name";
                        return Err(Flaw::Senseless { line, why: why.to_owned() });
                    }
                    Some(identity) => identity,
                    None if !has_local => Identity::Repository,
                    None if patterns.iter().all(|it| *it == Pattern::Local) => Identity::Any,
                    None => {
                        let why = "a rule for local and for repositories needs identity, because \
                            their defaults differ: write two rules, or identity = \"any\"";
                        return Err(Flaw::Senseless { line, why: why.to_owned() });
                    }
                };
                Accept::Signed(keys, identity)
            }
            _ => return Err(self.value(word, "accept", expected)),
        };
        let senseless = |why: &str| Err(Flaw::Senseless { line, why: why.to_owned() });
        let for_signed = ["keys", "identity"].iter().find(|it| fields.contains_key(*it));
        if !matches!(accept, Accept::Signed(..))
            && let Some(field) = for_signed
        {
            return senseless(&format!("{field} needs accept = \"signed\""));
        }
        if accept == Accept::None && !digests.is_empty() {
            return senseless("digests limit an accepting rule, but this rule accepts no images");
        }
        Ok(Rule { line, patterns, accept, digests })
    }

    fn digests(&self, value: Option<&Value<'_>>) -> Result<Vec<Digest>, Flaw> {
        let Some(value) = value else { return Ok(Vec::new()) };
        let texts = self.texts(value, "digests", "a non-empty list of digests")?;
        let parse = |(line, text): (usize, &str)| {
            text.parse().map_err(|error: crate::DigestError| Flaw::Senseless {
                line,
                why: error.to_string(),
            })
        };
        texts.into_iter().map(parse).collect()
    }

    fn keys(&self, value: &Value<'_>) -> Result<Vec<(PathBuf, PublicKey)>, Flaw> {
        let mut keys = Vec::new();
        for (line, text) in self.texts(value, "keys", "a non-empty list of files")? {
            let path = self.directory.join(text);
            let pem = match read(&path) {
                Ok(Some(pem)) => pem,
                Ok(None) => return Err(Flaw::Key { line, key: path, source: KeyError::Pem }),
                Err(source) => return Err(Flaw::KeyRead { line, key: path, source }),
            };
            match PublicKey::from_pem(&pem) {
                Ok(key) => keys.push((path, key)),
                Err(source) => return Err(Flaw::Key { line, key: path, source }),
            }
        }
        Ok(keys)
    }

    fn identity(&self, value: Option<&Value<'_>>) -> Result<Option<Identity>, Flaw> {
        let Some(value) = value else { return Ok(None) };
        let wrong =
            || self.value(value, "identity", "\"repository\", \"any\" or REGISTRY/REPOSITORY");
        match value.get_ref().as_str() {
            Some("repository") => Ok(Some(Identity::Repository)),
            Some("any") => Ok(Some(Identity::Any)),
            Some(name) => {
                let named = Repository::from_name(name).filter(|it| it.as_str() == name);
                named.map(|it| Some(Identity::Named(it))).ok_or_else(wrong)
            }
            None => Err(wrong()),
        }
    }
}

/// Returns the number of letters to insert, remove or change to turn one text into the other (Levenshtein distance).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, other) in b.iter().enumerate() {
            let change = diagonal + usize::from(letter != *other);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
#[cfg(feature = "signatures")]
mod tests;

/// Tests of builds that verify no signatures.
#[cfg(test)]
#[cfg(not(feature = "signatures"))]
mod unverified {
    use super::{Accept, Policy};

    #[test]
    fn a_policy_with_keys_is_an_error_and_others_are_obeyed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("policy.toml");
        std::fs::write(folder.path().join("a.pub"), "-----BEGIN PUBLIC KEY-----").unwrap();
        let rule = "default = \"none\"\n[[rule]]\nmatch = \"ghcr.io/x\"\n";
        std::fs::write(&file, format!("{rule}accept = \"signed\"\nkeys = \"a.pub\"\n")).unwrap();
        let error = Policy::load(&file).unwrap_err();
        let why = std::error::Error::source(&error.flaw).unwrap().to_string();
        assert!(why.contains("verifies no signatures"), "{why}");
        std::fs::write(&file, format!("{rule}accept = \"any\"\n")).unwrap();
        let policy = Policy::load(&file).unwrap().unwrap();
        assert!(matches!(policy.rules[0].accept, Accept::Any));
    }
}
