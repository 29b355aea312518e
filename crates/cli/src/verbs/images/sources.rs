//! Images of which `merge` and `filter` make another.

use store::{Form, OpenImage, RefName, Resolved, Store};

use crate::session::context::Context;

/// The images that one is made of. `gc` keeps them, and their objects, while they are open.
pub(crate) struct Sources {
    pub(crate) found: Vec<Resolved>,
    open: Vec<OpenImage>,
}

impl Sources {
    pub(crate) fn find(context: &Context, store: &Store, names: &[String]) -> anyhow::Result<Self> {
        let (mut found, mut open) = (Vec::new(), Vec::new());
        for name in names {
            let resolved = crate::session::resolve::resolve(store, name)?;
            // What is in it would be used by another name.
            let permitted = crate::session::policy::permit(context, store, resolved)?;
            found.push(permitted.found().clone());
            open.push(store.open_found(permitted.found())?);
        }
        Ok(Self { found, open })
    }

    /// That of the sources, if it is one; else what all of them can be in.
    pub(crate) fn form(&self) -> Form {
        let has = |form| self.open.iter().any(|it| it.form == form);
        match (has(Form::Tar), has(Form::Packed)) {
            (true, _) => Form::Tar,
            (false, true) => Form::Packed,
            (false, false) => Form::Objects,
        }
    }

    pub(crate) fn tell_config(&self, context: &Context, new: &RefName) {
        if self.found.iter().any(|it| it.manifest.is_some()) {
            context.remark(&format!(
                "{new} has files only, and no configuration (command, environment, user): `quire run {new} -- \
                 COMMAND` chooses the command"
            ));
        }
    }
}
