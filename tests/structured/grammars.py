"""Thirty grammars in Lark's notation, which the `lark` package also parses; GBNF grammars have an equivalent for it."""

from __future__ import annotations

LARK = {
    "arithmetic": r"""
        start: sum
        sum: product (("+" | "-") product)*
        product: atom (("*" | "/") atom)*
        atom: NUMBER | "(" sum ")"
        NUMBER: /[0-9]{1,3}/
    """,
    "json": r"""
        start: value
        value: "null" | "true" | "false" | STRING | NUMBER | "[" (value ("," value)*)? "]" | "{" (pair ("," pair)*)? "}"
        pair: STRING ":" value
        STRING: /"[a-z]{0,8}"/
        NUMBER: /-?(0|[1-9][0-9]{0,4})(\.[0-9]{1,3})?/
    """,
    "date": r"""
        start: YEAR "-" MONTH "-" DAY
        YEAR: /(19|20)[0-9]{2}/
        MONTH: /0[1-9]|1[0-2]/
        DAY: /0[1-9]|[12][0-9]|3[01]/
    """,
    "time": r"""
        start: HOUR ":" MINUTE (":" MINUTE)? ("Z" | ZONE)?
        HOUR: /[01][0-9]|2[0-3]/
        MINUTE: /[0-5][0-9]/
        ZONE: /[+-][01][0-9]:00/
    """,
    "version": r"""
        start: N "." N "." N ("-" TAG)?
        N: /0|[1-9][0-9]{0,2}/
        TAG: /(alpha|beta|rc)\.[0-9]/
    """,
    "ip address": r"""
        start: BYTE "." BYTE "." BYTE "." BYTE
        BYTE: /25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9]/
    """,
    "list of words": r"""
        start: WORD ("," " " WORD)*
        WORD: /[a-z]{1,9}/
    """,
    "s-expression": r"""
        start: list
        list: "(" (item (" " item)*)? ")"
        item: ATOM | list
        ATOM: /[a-z+*-]{1,6}|[0-9]{1,3}/
    """,
    "balanced": r"""
        start: pair+
        pair: "(" pair* ")" | "[" pair* "]"
    """,
    "csv": r"""
        start: line ("\n" line)~0..3
        line: CELL ("," CELL)~2
        CELL: /[A-Za-z0-9 ]{1,8}/
    """,
    "chess": r"""
        start: (MOVE " ")~1..6 RESULT
        MOVE: /[KQRBN]?[a-h][1-8](=[QRBN])?[+#]?/
        RESULT: "1-0" | "0-1" | "1/2-1/2"
    """,
    "rule over rules": r"""
        start: a
        a: "x" b | "y"
        b: "(" a ")" | a
    """,
    "sql": r"""
        start: "SELECT " columns " FROM " NAME (" WHERE " condition)? ";"
        columns: "*" | NAME (", " NAME)*
        condition: NAME OPERATOR VALUE (" AND " NAME OPERATOR VALUE)*
        OPERATOR: " = " | " < " | " > "
        NAME: /[a-z][a-z_]{0,7}/
        VALUE: /[0-9]{1,4}|'[a-z]{0,6}'/
    """,
    "assignment": r"""
        start: (NAME " = " NUMBER ";\n")+
        NAME: /[a-z]{1,5}/
        NUMBER: /[0-9]{1,5}/
    """,
    "boolean": r"""
        start: or
        or: and (" or " and)*
        and: not (" and " not)*
        not: "not " not | ATOM | "(" or ")"
        ATOM: /[a-d]/
    """,
    "html": r"""
        start: tag
        tag: "<p>" content "</p>" | "<b>" content "</b>"
        content: (TEXT | tag)*
        TEXT: /[a-z ]{1,12}/
    """,
    "url": r"""
        start: "https://" HOST ("/" PART)* ("?" PART "=" PART)?
        HOST: /[a-z]{2,8}\.(org|com|net)/
        PART: /[a-z0-9]{1,7}/
    """,
    "mail address": r"""
        start: PART ("." PART)? "@" PART "." ENDING
        PART: /[a-z]{1,8}/
        ENDING: "org" | "com"
    """,
    "phone": r"""
        start: "+" COUNTRY " " DIGITS (" " DIGITS)~1..2
        COUNTRY: /[1-9][0-9]{0,2}/
        DIGITS: /[0-9]{2,4}/
    """,
    "roman": r"""
        start: HUNDREDS TENS? ONES?
        HUNDREDS: /C{1,3}/
        TENS: /XC|XL|LX{0,3}|X{1,3}/
        ONES: /IX|IV|VI{0,3}|I{1,3}/
    """,
    "poem": r"""
        start: LINE "\n" LINE "\n" LINE
        LINE: /[A-Z][a-z]{1,5}( [a-z]{1,5}){1,3}[,.]/
    """,
    "tree": r"""
        start: node
        node: LEAF | "{" node " " node "}"
        LEAF: /[0-9]/
    """,
    "palindrome": r"""
        start: p
        p: "a" p "a" | "b" p "b" | "c"
    """,
    "two languages": r"""
        start: english | french
        english: "yes" | "no, " REASON
        french: "oui" | "non, " REASON
        REASON: /[a-z ]{3,15}/
    """,
    "color": r"""
        start: "#" HEX | "rgb(" N "," N "," N ")"
        HEX: /[0-9a-f]{6}/
        N: /25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9]/
    """,
}
TWINS = {
    "gbnf list": (
        r"""
            root ::= ("- " [a-z]+ "\n")+
        """,
        r"""
            start: ("- " WORD "\n")+
            WORD: /[a-z]+/
        """,
    ),
    "gbnf sum": (
        r"""
            root ::= t ("+" t)*
            t ::= [0-9]+ | "(" root ")"
        """,
        r"""
            start: r
            r: t ("+" t)*
            t: N | "(" r ")"
            N: /[0-9]+/
        """,
    ),
    "gbnf range": (
        r"""
            root ::= [a-f]{2,4} "-" [0-9]{3}
        """,
        r"""
            start: A "-" B
            A: /[a-f]{2,4}/
            B: /[0-9]{3}/
        """,
    ),
    "gbnf option": (
        r"""
            root ::= "Mr. " name | "Ms. " name
            name ::= [A-Z] [a-z]{1,7}
        """,
        r"""
            start: ("Mr. " | "Ms. ") N
            N: /[A-Z][a-z]{1,7}/
        """,
    ),
    "gbnf nested": (
        r"""
            root ::= "[" (root ("," root)*)? "]"
        """,
        r"""
            start: r
            r: "[" (r ("," r)*)? "]"
        """,
    ),
}
"""GBNF grammars, and equivalents for the `lark` package."""

ALL = [(name, text, text) for name, text in LARK.items()] + [(name, *pair) for name, pair in TWINS.items()]
