//! Files with settings in TOML. Each error names the file and the line.

use toml::Spanned;
use toml::de::{DeString, DeTable};

/// Maximum size of a settings file, in bytes.
pub(crate) const FILE_MAX: u64 = 1 << 20;

/// The text of a file, and its settings.
pub(crate) struct SettingsFile<'t> {
    text: &'t str,
    path: &'t str,
    table: Spanned<DeTable<'t>>,
}

impl<'t> SettingsFile<'t> {
    /// Parses the text of the file `path`. `example` is a setting for the error of a text that is not TOML.
    pub(crate) fn parse(text: &'t str, path: &'t str, example: &str) -> anyhow::Result<Self> {
        let parsed = DeTable::parse(text);
        let table = parsed.map_err(|error| {
            let place = error.span().map_or(text.len(), |it| it.start);
            anyhow::anyhow!(
                "{}: {}: write one setting on each line, for example {example}",
                line(text, path, place),
                error.message()
            )
        })?;
        Ok(Self { text, path, table })
    }

    /// Returns the settings of the file.
    pub(crate) fn table(&self) -> &DeTable<'t> {
        self.table.get_ref()
    }

    /// Returns the file and the line of a key.
    pub(crate) fn place(&self, key: &Spanned<DeString<'_>>) -> String {
        line(self.text, self.path, key.span().start)
    }
}

fn line(text: &str, path: &str, place: usize) -> String {
    let before = text.get(..place).unwrap_or(text);
    format!("{path}, line {}", before.matches('\n').count() + 1)
}
