# Completion of quire for bash. It asks quire for the words.
_quire() {
    local line=${COMP_LINE:0:COMP_POINT} current done word
    local -a words
    COMPREPLY=()
    IFS=$' \t\n' read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=('')
    # The words before may be `sudo`, or variables.
    while ((${#words[@]} > 1)) && [[ ${words[0]} != "$1" ]]; do
        words=("${words[@]:1}")
    done
    current=${words[${#words[@]} - 1]}
    # Bash replaces only what follows these characters.
    done=
    if [[ $current == *[:=]* && $COMP_WORDBREAKS == *[:=]* ]]; then
        done=${current%"${current##*[:=]}"}
    fi
    while IFS= read -r word; do
        case $word in
            :files) compopt -o default ;;
            :directories) compopt -o dirnames ;;
            :programs) COMPREPLY=($(compgen -c -- "$current")) ;;
            *) COMPREPLY+=("${word#"$done"}") ;;
        esac
    done < <("${1/#\~\//$HOME/}" completions bash -- "${words[@]:1}" 2>/dev/null)
}
complete -F _quire quire
