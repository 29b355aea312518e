//! Reads a private key from a file, with the passphrase of the user.

use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, bail};
use oci::signing::{KeyFile, PASSPHRASE_VARIABLE, Passphrase, SigningKey, read_secret};

use crate::session::context::Context;
use crate::session::prompt::Terminal;
use crate::session::settings::option_file::keep_out_of_dumps;
use crate::session::signals::until_signal;

/// Permissions of others than the owner.
const OTHERS: u32 = 0o077;

/// The names of the options, for messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyOptions {
    /// Option with the key.
    pub(crate) key: &'static str,
    /// Option with the file of the passphrase.
    pub(crate) passphrase: &'static str,
}

/// Reads a key, and asks for its passphrase if it is encrypted and nothing else has it.
pub(crate) fn read_key(
    context: &Context,
    file: &Path,
    passphrase: Option<&Path>,
    options: KeyOptions,
) -> anyhow::Result<SigningKey> {
    keep_out_of_dumps().context("cannot keep the key out of core dumps")?;
    let named = || format!("{} {}", options.key, file.display());
    let opened =
        oci::files::regular(file).with_context(|| format!("{}: cannot read it", named()))?;
    let metadata = opened.metadata().with_context(named)?;
    let is_open = metadata.mode() & OTHERS != 0;
    let bytes = read_secret(opened).with_context(|| format!("{}: cannot read it", named()))?;
    let key = KeyFile::parse(&bytes).with_context(named)?;
    if !key.is_encrypted() {
        // As ssh(1) does.
        if is_open {
            bail!(
                "{}: other users have permissions for it, and it is not encrypted: `chmod 600 {}`",
                named(),
                file.display()
            );
        }
        return key.unlock(&Passphrase::new(Vec::new())).with_context(named);
    }
    if is_open {
        remark(context, file);
    }
    let passphrase = match (passphrase, std::env::var_os(PASSPHRASE_VARIABLE)) {
        (Some(file), _) => {
            let named = || format!("{} {}: cannot read it", options.passphrase, file.display());
            let opened = oci::files::regular(file).with_context(named)?;
            if opened.metadata().with_context(named)?.mode() & OTHERS != 0 {
                remark(context, file);
            }
            Passphrase::first_line(read_secret(opened).with_context(named)?)
        }
        (None, Some(text)) => Passphrase::new(text.into_vec()),
        (None, None) => ask(file, options)?,
    };
    key.unlock(&passphrase).with_context(named)
}

/// Warns of a file that others may read.
fn remark(context: &Context, file: &Path) {
    let file = file.display();
    context.remark(&format!("other users have permissions for {file}: `chmod 600 {file}`"));
}

fn ask(file: &Path, options: KeyOptions) -> anyhow::Result<Passphrase> {
    let terminal = Terminal::open().with_context(|| {
        format!(
            "{} {} is encrypted, and there is no terminal to prompt on: {} FILE or ${PASSPHRASE_VARIABLE} has the passphrase",
            options.key,
            file.display(),
            options.passphrase
        )
    })?;
    let cancel = Arc::new(AtomicBool::new(false));
    let question = format!("passphrase of {}: ", file.display());
    let text = until_signal(&cancel, || terminal.ask_hidden(&question, &cancel))??;
    Ok(Passphrase::from(text))
}
