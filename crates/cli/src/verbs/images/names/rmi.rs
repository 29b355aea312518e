//! `rmi`: removes names of images.

use clap::Args;
use oci::reference::Reference;
use store::{Digest, OpenOptions, RefError, RefName, Resolved, Store};

use crate::Answer;
use crate::session::context::Context;
use crate::session::resolve::resolve;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Rmi {
    /// Names of images
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
    /// Ignore names that do not exist
    #[arg(short, long)]
    pub(crate) force: bool,
}

impl VerbArgs for Rmi {
    const NAME: &'static str = "rmi";
    const ABOUT: &'static str = "Remove names of images; `gc` then frees the space";
    const EXAMPLES: &'static str = "quire rmi app:old";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        rmi(context, self)
    }
}

pub(crate) fn rmi(context: &Context, args: &Rmi) -> anyhow::Result<Answer> {
    let Some(store) = context.open_for(OpenOptions::write(), args.force)? else {
        return Ok(Answer::Yes);
    };
    // Look up all names before any of them is removed.
    let names = args.names.iter().map(|text| image_names(&store, text, args.force));
    let names = names.collect::<anyhow::Result<Vec<_>>>()?;
    remove_names(context, &store, names.into_iter().flatten())
}

/// Returns whether Docker would complete `text` to `whole`. Ids of images are not completed.
fn is_short_for(text: &str, whole: &RefName) -> bool {
    text.parse::<Reference>().is_ok_and(|reference| {
        let tag = reference.tag().unwrap_or("latest");
        reference.digest().is_none() && whole.as_str() == format!("{}:{tag}", reference.name())
    })
}

/// A name to remove.
struct DoomedName {
    name: RefName,
    /// The image of the name, if it was found by the id of its image. Otherwise the name is removed in any case.
    reference: Option<store::Reference>,
}

/// Returns the names that `text` stands for. `text` may be an image's id, as `images -q` prints it, or the digest of a
/// manifest.
fn image_names(store: &Store, text: &str, force: bool) -> anyhow::Result<Vec<DoomedName>> {
    let is_name = text.parse().is_ok_and(|name| !matches!(store.refs.get(&name), Ok(None)));
    let digest = text.parse::<Digest>().ok();
    let is_id =
        |id: &str| !is_name && (digest.is_some() || id.starts_with(&text.to_ascii_lowercase()));
    let id = store.resolve(text).ok().map(|it| it.image).filter(|it| is_id(&it.to_string()));
    let Some(id) = id else {
        let name = image_name(store, text, force)?;
        return Ok(name.into_iter().map(|name| DoomedName { name, reference: None }).collect());
    };
    let (refs, _) = store.refs.readable()?;
    let is_meant = |it: &store::Reference| {
        it.image == id && digest.is_none_or(|digest| it.manifest == Some(digest))
    };
    let names = refs.into_iter().filter(|(_, it)| is_meant(it));
    let (mut names, unnamed): (Vec<_>, Vec<_>) = names
        .map(|(name, it)| DoomedName { name, reference: Some(it) })
        .partition(|it| !it.name.is_unnamed());
    if names.is_empty() || force {
        names.extend(unnamed);
    }
    if names.is_empty() && !force {
        anyhow::bail!("\"{text}\" is an image id, not a name");
    }
    if names.len() > 1 && !force {
        let names: Vec<_> = names.iter().map(|it| it.name.as_str()).collect();
        anyhow::bail!(
            "image \"{text}\" has several names: give the names to remove, or use --force for \
            all: {}",
            names.join(", ")
        );
    }
    Ok(names)
}

/// Returns the name of an image that `text` stands for; `None` if the name does not exist and `force` is set.
pub(crate) fn image_name(
    store: &Store,
    text: &str,
    force: bool,
) -> anyhow::Result<Option<RefName>> {
    let name: RefName = match text.parse::<RefName>() {
        // A pulled image is named by its whole reference.
        Ok(name) if !matches!(store.refs.get(&name), Ok(None)) => name,
        name => match resolve(store, text) {
            Ok(Resolved { name: Some(whole), .. }) if is_short_for(text, &whole) => whole,
            _ => name?,
        },
    };
    // A name with a damaged record also exists, and may be removed because of that damage.
    match store.refs.get(&name) {
        Ok(None) if force => Ok(None),
        Ok(None) => {
            // The usual error of a missing name suggests similar names.
            store.resolve(text)?;
            anyhow::bail!("\"{text}\" is an image id, not a name");
        }
        Err(error @ RefError::Disk(_)) => Err(error.into()),
        Ok(Some(_)) | Err(_) => Ok(Some(name)),
    }
}

fn remove_names(
    context: &Context,
    store: &Store,
    names: impl Iterator<Item = DoomedName>,
) -> anyhow::Result<Answer> {
    let mut is_any = false;
    for DoomedName { name, reference } in names {
        is_any = true;
        match reference {
            Some(reference) => {
                if !store.remove_ref_if(&name, &reference)? {
                    context.remark(&format!(
                        "{name} stays: another command has changed it at the same time"
                    ));
                }
            }
            None => match store.remove_ref(&name) {
                // The name was given twice, or another process removed it in the meantime.
                Err(RefError::Absent(_)) => {}
                result => {
                    result?;
                }
            },
        }
    }
    if is_any {
        context.remark("names removed; `quire gc` frees unused data");
    }
    Ok(Answer::Yes)
}
