//! `--label` and `--label-file`: words that a user attaches to a container or a volume.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};

use crate::session::settings::option_file;

/// Maximum length of all labels as JSON, in bytes. Commands that list labels read them all.
const MOST: usize = 1 << 20;

// Labels of a container.
#[derive(Debug, Args)]
pub(crate) struct Labels {
    /// Attach a label. Without =VALUE, its value is empty
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(crate) label: Vec<String>,
    /// Attach the labels of this file: one NAME=VALUE in each line, # begins a comment. --label overrides the file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) label_file: Vec<PathBuf>,
}

/// Parses `NAME[=VALUE]`.
pub(crate) fn label(text: &str) -> anyhow::Result<(String, String)> {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    // Source: podman, `pkg/parse`, `GetAllLabels`.
    if name.is_empty() {
        bail!("\"{}\" is not a label: write NAME=VALUE", text.escape_debug());
    }
    Ok((name.to_owned(), value.to_owned()))
}

/// Adds the labels of a text in the form of a label file.
fn add_lines(labels: &mut BTreeMap<String, String>, text: &str) -> anyhow::Result<()> {
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start_matches([' ', '\t']);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        labels.extend([label(line).with_context(|| format!("line {}", index + 1))?]);
    }
    Ok(())
}

impl Labels {
    /// Reads the labels. A file may be a pipe without a writer, so this is called while signals still end the process.
    pub(crate) fn read(&self) -> anyhow::Result<BTreeMap<String, String>> {
        let mut labels = BTreeMap::new();
        for path in &self.label_file {
            let failed = || format!("--label-file {}", path.display());
            let bytes = option_file::read(path).with_context(failed)?;
            let text = String::from_utf8(bytes).ok().context("it is not UTF-8");
            add_lines(&mut labels, &text.with_context(failed)?).with_context(failed)?;
        }
        for text in &self.label {
            labels.extend([label(text).context("--label")?]);
        }
        // JSON has six bytes for some characters.
        let length = serde_json::to_vec(&labels)?.len();
        if length > MOST {
            bail!(
                "--label: the labels of a container may have {} KiB as JSON, and these have {}: use shorter ones, or \
                fewer control characters",
                MOST >> 10,
                length.div_ceil(1024)
            );
        }
        Ok(labels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_files_and_of_the_command_line() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, b"# no\n\n \ta=file\nb=x=y\nc\n").unwrap();
        let labels = Labels {
            label: vec!["a=own".to_owned(), "d=".to_owned()],
            label_file: vec![file.path().to_owned()],
        };
        let expect = [("a", "own"), ("b", "x=y"), ("c", ""), ("d", "")];
        let expect = expect.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(labels.read().unwrap(), expect.into());
        for (text, line) in [("=x", "line 1"), ("a\n=", "line 2")] {
            let error = add_lines(&mut BTreeMap::new(), text).unwrap_err();
            assert_eq!(error.to_string(), line);
        }
        let long = Labels { label: vec!["x".repeat(MOST + 1)], label_file: Vec::new() };
        assert!(long.read().unwrap_err().to_string().contains("1024 KiB"));
        let escaped = |count| Labels { label: vec!["\x01".repeat(count)], label_file: Vec::new() };
        assert!(escaped(MOST / 6 + 1).read().unwrap_err().to_string().contains("1024 KiB"));
        assert_eq!(escaped(MOST / 6 - 10).read().unwrap().len(), 1);
    }
}
