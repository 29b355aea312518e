//! `tag` and `rm`: names of images.

use store::{Form, OpenOptions, RefError, RefName, Reference};

use crate::Answer;
use crate::args;
use crate::context::{Context, now};

pub(crate) fn tag(context: &Context, args: &args::Tag) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = store.resolve(&args.name)?;
    let new: RefName = args.new.parse()?;
    let form = match &found.name {
        Some(name) => store.reference(name)?.map(|it| it.form),
        None => None,
    };
    let reference = Reference {
        image: found.image,
        manifest: found.manifest,
        form: form.unwrap_or(Form::Objects),
        created: now(),
    };
    store.set_ref(&new, &reference)?;
    Ok(Answer::Yes)
}

pub(crate) fn rm(context: &Context, args: &args::Rm) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    for text in &args.names {
        let name: RefName = text.parse()?;
        match store.remove_ref(&name) {
            Err(RefError::Absent(_)) if args.force => {}
            Err(RefError::Absent(_)) => {
                // The usual error of a name that is not there knows the names that are alike.
                store.resolve(text)?;
                anyhow::bail!("\"{text}\" is an image, but no name: nothing to remove");
            }
            result => {
                result?;
            }
        }
    }
    context.remark("names removed; `quire gc` frees what nobody uses");
    Ok(Answer::Yes)
}
